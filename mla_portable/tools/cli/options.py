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
    typer.Option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N. Default: the first GPU, else the CPU."),
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
    """The device that `--device` names, with its index; the first GPU where the option is absent, else the CPU.

    A GPU becomes the current one, where kernels are launched.
    Raises: typer.BadParameter for a device type that nothing here serves; InvalidArgument for a name torch does not know
    and for a GPU that is not there.
    """
    import torch

    from mla_portable.registry.facts import resolve_device as resolve

    device = resolve(text or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    if device.type not in ("cpu", "cuda"):
        raise typer.BadParameter(f"got {text!r}, expected cpu, cuda or cuda:N", param_hint="--device")
    if device.type == "cpu":
        if device.index:
            raise typer.BadParameter(f"got {text!r}; there is one CPU device, cpu", param_hint="--device")
        return torch.device("cpu")
    torch.cuda.set_device(device)
    return device


def primitive_named(text: str, *, param_hint: str) -> Primitive:
    """The primitive called `text`. Raises: typer.BadParameter with all names."""
    from mla_portable.contracts import Primitive

    try:
        return Primitive.named(text)
    except ValueError as error:
        raise typer.BadParameter(
            f"got {text!r}, expected one of {', '.join(Primitive.all())}", param_hint=param_hint
        ) from error
