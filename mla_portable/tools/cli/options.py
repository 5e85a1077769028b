# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, and the values they stand for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch

    from mla_portable.contracts import Primitive

__all__ = ["BackendOption", "DeviceOption", "JsonOption", "primitive_named", "resolve_device"]

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else; messages go to stderr.")
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="torch's name: cpu, cuda, cuda:N, ... Default: the first accelerator, else the CPU.",
    ),
]
BackendOption = Annotated[
    str | None,
    typer.Option(
        "--backend",
        metavar="NAME",
        help="Force a backend ('triton') or one implementation ('triton.portable'); a forced choice never falls back. "
        "Default: the registry chooses.",
    ),
]


def resolve_device(text: str | None) -> torch.device:
    """The device that `--device` names, with its index; the first accelerator where the option is absent, else the CPU.

    An accelerator becomes the current one, where kernels are launched.
    Raises: typer.BadParameter for a second CPU; InvalidArgument for a name torch does not know and a device that is not there.
    """
    from mla_portable.accelerator import accelerator
    from mla_portable.dispatch import current_registry
    from mla_portable.registry.facts import resolve_device as resolve

    registry = current_registry()  # first: a vendor's plugin may bring the device type
    device = resolve(text or registry.default_device())
    where = accelerator(device)
    if where.is_host and device.index:
        raise typer.BadParameter(f"got {text!r}; there is one CPU device, cpu", param_hint="--device")
    where.make_current()
    return where.device


def primitive_named(text: str, *, param_hint: str) -> Primitive:
    """The primitive called `text`. Raises: typer.BadParameter with all names."""
    from mla_portable.contracts import Primitive
    from mla_portable.dispatch import current_registry

    current_registry()  # loads the plugins, which may bring primitives
    try:
        return Primitive.named(text)
    except ValueError as error:
        raise typer.BadParameter(
            f"got {text!r}, expected one of {', '.join(Primitive.all())}", param_hint=param_hint
        ) from error
