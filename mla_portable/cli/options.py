# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, and the values they stand for."""

from __future__ import annotations

import errno
import functools
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from difflib import get_close_matches
from inspect import Parameter, signature
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from mla_portable.models import MODELS, Model

if TYPE_CHECKING:
    import torch

    from mla_portable.capability.profiles import Profile
    from mla_portable.contracts import Primitive
    from mla_portable.judge.problems.selections import Selections

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
ModelOption = Annotated[
    str, typer.Option("--model", metavar="MODEL", help="Whose layers: deepseek-v3.2, glm-5, ... Default: deepseek-v3.2.")
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FILE", help="Add the results to the file of a run, a .json.gz (docs/dev/evidence.md).", dir_okay=False
    ),
]
WhoOption = Annotated[
    str | None,
    typer.Option("--who", metavar="NAME", help="Name for the file: who runs this. Default: git's user.name, or the login."),
]
CommitOption = Annotated[
    str | None,
    typer.Option("--commit", metavar="COMMIT", help="Commit of the code that runs, 40 digits. Default: git's."),
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

SelectionsOption = Annotated[
    Path | None,
    typer.Option(
        "--selections",
        metavar="FILE",
        help="Use what a model's indexer selected, from a .npz (docs/dev/bench.md), in place of random lists.",
        dir_okay=False,
    ),
]
LayersOption = Annotated[
    str | None,
    typer.Option(
        "--layers",
        metavar="N,N",
        help="With --selections: these layers of the file. Default: those whose neighbouring tokens share least, in the middle "
        "and most.",
    ),
]


def resolve_device(text: str | None) -> torch.device:
    """The device that `--device` names, with its index; the first accelerator where the option is absent, else the CPU.

    An accelerator becomes the current one, where kernels are launched.
    Raises: typer.BadParameter for a second CPU; InvalidArgument for a name torch does not know and a device that is not there.
    """
    from mla_portable.accelerator import accelerator
    from mla_portable.choose.facts import resolve_device as resolve
    from mla_portable.dispatch import current_registry

    registry = current_registry()  # first: a vendor's plugin may bring the device type
    device = resolve(text or registry.default_device())
    where = accelerator(device)
    if where.is_host and device.index:
        raise typer.BadParameter(f"must be cpu, the one CPU device (got {text!r})", param_hint="--device")
    where.make_current()
    return where.device


def help_of(function: Callable[..., object]) -> str:
    """A command's docstring as its help: a line for each paragraph, which the terminal wraps."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in (function.__doc__ or "").split("\n\n"))


def in_help(examples: Iterable[str]) -> str:
    """Examples of a command as the end of its help, a line for each."""
    return "\n\n".join(("Examples:", *(f"mla-portable {each}" for each in examples)))


def check_name(kind: Literal["primitive", "backend", "layout"], text: str, *, param_hint: str) -> None:
    """Refuse a name that nothing installed here has, before torch is loaded.

    The generated table names everything. Where it is of other plugins than the installed ones, or a registry is there already,
    that answers later. Raises: typer.BadParameter.
    """
    from mla_portable.capability.matrix import installed_matrix

    matrix = None if "mla_portable.dispatch" in sys.modules else installed_matrix()
    if matrix is None:
        return
    implementations = {name for name, _ in matrix.implementations}
    plugins = {name for name, *_ in matrix.plugins}
    known = {
        "primitive": {primitive for _, primitive in matrix.implementations},
        "layout": set(matrix.layouts),
        "backend": implementations | plugins | {"auto"},
    }[kind]
    variant = ", or one of its implementations (see `mla-portable doctor --all`)" if kind == "backend" else ""
    check_known(text, known, param_hint=param_hint, shown=plugins if kind == "backend" else known, others=variant)


def model_named(name: str, can: Callable[[Model], bool]) -> Model:
    """The model that a user names by `--model`. can: of which models the command runs layers. Raises: typer.BadParameter."""
    known = {slug: model for slug, model in MODELS.items() if can(model)}
    slug = name.lower()
    check_known(slug, known, param_hint="--model")
    return known[slug]


def check_known(
    text: str, known: Collection[str], *, param_hint: str, shown: Collection[str] | None = None, others: str = ""
) -> None:
    """Refuse a name that is not among those that are `known`, and offer the one most like it.

    Args:
        shown: the names to list, where those are not all of the known ones. others: words on the names that are not listed.
    Raises: typer.BadParameter.
    """
    if text in known:
        return
    near = [name for name in sorted(known) if name.startswith(text)] or get_close_matches(text, known, n=1)
    question = f". Did you mean {near[0]!r}?" if near else ""
    listed = ", ".join(sorted(known if shown is None else shown))
    raise typer.BadParameter(f"must be one of {listed}{others} (got {text!r}){question}", param_hint=param_hint)


def profile_by_name(name: str, records: Path | None, *, param_hint: str, others: Collection[str] = ()) -> Profile:
    """The device profile that a user names, by its slug, by the beginning of it, or as the device's driver names the device.

    Args:
        records: a folder with profiles beside those that ship. others: names of devices that have no profile, to be listed.
    Raises: typer.BadParameter for a name that no profile has; RecordError.
    """
    from mla_portable.capability.model import RecordError
    from mla_portable.capability.profiles import all_profiles, profile_named

    profiles = all_profiles(records)
    try:
        return profile_named(name, profiles)
    except RecordError as error:
        if error.where == f"device {name!r}":
            check_known(name, profiles, shown={*others, *profiles}, param_hint=param_hint)
        raise


def check_writable(path: Path, *, param_hint: str) -> None:
    """Refuse a file that cannot be written, before the work whose result goes there. Its folder is made.

    A regular file is replaced by one that is written beside it, so its folder has to be writable, too.
    Raises: typer.BadParameter.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "not a regular file")
        with path.open("r+") if path.exists() else nullcontext(), TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        why = f"{type(error).__name__}: {error.strerror}"
        raise typer.BadParameter(f"must be a file that can be written (got {path}: {why})", param_hint=param_hint) from error


def primitive_named(text: str, *, param_hint: str) -> Primitive:
    """The primitive called `text`. Raises: typer.BadParameter with all names."""
    check_name("primitive", text, param_hint=param_hint)
    from mla_portable.contracts import Primitive
    from mla_portable.dispatch import current_registry

    current_registry()  # loads the plugins, which may bring primitives
    check_known(text, Primitive.all(), param_hint=param_hint)
    return Primitive.named(text)


def numbers(text: str | None, option: str) -> tuple[int, ...] | None:
    """'16,32' as numbers. Raises: typer.BadParameter."""
    if text is None:
        return None
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"must be numbers such as 16,32 (got {text!r})", param_hint=option) from error


def selected_layers(file: Path | None, layers: str | None) -> tuple[Selections | None, tuple[int, ...]]:
    """What `--selections` names, and the layers of it. Raises: typer.BadParameter; InvalidArgument for the file."""
    chosen = numbers(layers, "--layers")
    if file is None:
        if chosen is not None:
            raise typer.BadParameter("needs --selections: it names layers of that file", param_hint="--layers")
        return None, ()
    from mla_portable.judge.problems.selection_lists import statistics_of, typical_layers
    from mla_portable.judge.problems.selections import read_selections

    selections = read_selections(file)
    known = [int(each) for each in selections.layers]
    for layer in chosen or ():
        if layer not in known:
            raise typer.BadParameter(f"must be of {', '.join(map(str, known))} (got {layer})", param_hint="--layers")
        statistics_of(selections, layer)
    return selections, chosen or typical_layers(selections)


def with_options(options: Mapping[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command options of its own beside its parameters; it gets those that are given, by name, as `options`.

    Args:
        options: name -> annotation, as of a parameter of a typer command; the default of each is None.
    """
    shared = [Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=each) for name, each in options.items()]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            chosen = {name: given.pop(name) for name in options}
            command(**given, options={name: value for name, value in chosen.items() if value not in (None, [])})

        hints = get_type_hints(command, include_extras=True)
        own = [
            each.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[each.name])
            for each in signature(command).parameters.values()
            if each.name != "options"
        ]
        parameters = sorted([*own, *shared], key=lambda each: each.default is not Parameter.empty)
        vars(run).update(
            __signature__=signature(command).replace(parameters=parameters),
            __annotations__={each.name: each.annotation for each in parameters},
        )
        return run

    return decorate
