# SPDX-License-Identifier: Apache-2.0
"""What a user set, in environment variables and in the folder that one names: the one place that reads and checks them.

The core's own variables are listed here; plugins and adapters for engines declare theirs. Every other name of the project is an
error. What files mean is for their owner, `own_times`.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from mla_portable.choose.faults import contained, first_line
from mla_portable.choose.limits import PLUGIN_TIMEOUT
from mla_portable.choose.names import closest
from mla_portable.contracts import InvalidArgument, Primitive, Variable

PREFIX: Final = "MLA_PORTABLE_"
ENV_BACKEND: Final = "MLA_PORTABLE_BACKEND"
ENV_DISABLE: Final = "MLA_PORTABLE_DISABLE"
ENV_TIMES: Final = "MLA_PORTABLE_TIMES"
ENV_TUNED: Final = "MLA_PORTABLE_TUNED"
"""Of release 0.2 and older."""
MOST_BYTES: Final = 1 << 20
"""Of a file; times of one device have some tens of thousands."""
_BACKEND_NAME: Final = "the name of a backend or of one of its variants, or auto"

_FIXED: Final = (
    Variable(ENV_BACKEND, _BACKEND_NAME),
    Variable(ENV_DISABLE, "names of backends or of their variants, separated by commas"),
    Variable(ENV_TIMES, "the path of a folder"),
    Variable(ENV_TUNED, "nothing: it is no longer read"),
    Variable(PLUGIN_TIMEOUT, "seconds, 0 or more (0: no limit)"),
)
"""Names, paths and seconds are checked where they are read."""
REMOVED: Final = {
    "MLA_PORTABLE_POLICY": f"Set {ENV_BACKEND} to the file's `default`, {ENV_BACKEND}_<PRIMITIVE> to what it names for a "
    f"primitive, and {ENV_DISABLE} to what it disables, separated by commas."
}
"""Variables of earlier versions -> what to do instead."""


def value_of(environ: Mapping[str, str], name: str) -> str:
    """The value of a variable without the spaces around it; "" where it is not set. An empty variable is not set."""
    return environ.get(name, "").strip()


def path_of(environ: Mapping[str, str], name: str) -> Path | None:
    """The path that a variable names, None where it is not set; "~" is the user's home directory, where there is one."""
    text = value_of(environ, name)
    if not text:
        return None
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def read_text_file(path: Path) -> str:
    """The text of a regular file, UTF-8 with or without a byte-order mark.

    Raises: OSError when it cannot be read, or is a directory, FIFO or device; ValueError when it has more than MOST_BYTES, is
        not UTF-8, or the path holds a NUL.
    """
    status = path.stat()  # before it is opened: opening a FIFO waits for a writer
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"'{path}' is not a regular file")
    if status.st_size > MOST_BYTES:
        raise ValueError(f"'{path}' has {status.st_size} bytes, more than {MOST_BYTES}")
    return path.read_text(encoding="utf-8-sig")


def backend_variables() -> dict[str, Primitive[Any]]:
    """The variable that forces a backend for each primitive that is known so far -> the primitive."""
    return {f"{ENV_BACKEND}_{str(primitive).upper()}": primitive for primitive in Primitive.all()}


def core_variables() -> tuple[Variable, ...]:
    """Every variable that is not declared by a hook; those of primitives follow from the primitives that are known so far."""
    return (*_FIXED, *(Variable(name, _BACKEND_NAME) for name in backend_variables()))


_KUBERNETES: Final = re.compile(r".*_SERVICE_(HOST|PORT(_.+)?)|(.+_)?PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?")
"""What Kubernetes sets in every container of a namespace with a service called mla-portable, or mla-portable-something."""


def prefix_of(plugin: str) -> str:
    """What the names of a plugin's variables start with; the name itself is the plugin's too."""
    return PREFIX + re.sub(r"\W", "_", plugin).upper()


def check_variables(environ: Mapping[str, str], variables: Iterable[Variable] = (), unloaded: Collection[str] = ()) -> None:
    """Every variable of this project that is set is known and has an allowed value; an empty one is not set.

    Args:
        variables: that were declared by hooks. unloaded: plugins whose variables are not known, as they did not load.
    Raises: InvalidArgument for the first, in alphabetical order, that is not.
    """
    known = {variable.name: variable for variable in (*core_variables(), *variables)}
    for name, value in sorted(environ.items()):
        value = value.strip()
        if not name.startswith(PREFIX) or not value or _KUBERNETES.fullmatch(name):
            continue
        if name in known:
            check_value(known[name], value)
        elif not any(name == prefix_of(plugin) or name.startswith(f"{prefix_of(plugin)}_") for plugin in unloaded):
            names = {each.removeprefix(PREFIX): each for each in known}
            listed = {f"{ENV_BACKEND}_<PRIMITIVE>" if each in backend_variables() else each for each in known}
            raise InvalidArgument(
                "environment",
                name,
                got="a variable that does not exist",
                expected=f"one of {', '.join(sorted(listed))}",
                remedy=REMOVED.get(name) or closest(name.removeprefix(PREFIX), names, prefix=PREFIX) or f"Unset {name}.",
            )


def check_value(variable: Variable, value: str) -> None:
    """Raise InvalidArgument unless a variable may be set to this value, stripped; "" stands for one that is not set."""
    if value and not _accepts(variable, value):
        remedy = f"Unset {variable.name}, or set it to an allowed value."
        raise InvalidArgument("environment", variable.name, got=repr(value), expected=variable.expected, remedy=remedy)


def read(variable: Variable, environ: Mapping[str, str] | None = None) -> str:
    """The value without the spaces around it, "" where it is not set, for whoever reads it before there is a registry.

    Args:
        environ: os.environ where None.
    Raises: InvalidArgument for a value that is not allowed.
    """
    value = value_of(os.environ if environ is None else environ, variable.name)
    check_value(variable, value)
    return value


def _accepts(variable: Variable, value: str) -> bool:
    """Whether a variable may have this value, by code of the plugin that declared it.

    Raises: InvalidArgument with its error where that raises.
    """
    try:
        return bool(contained(partial(variable.accepts, value)))
    except Exception as error:
        remedy = f"The plugin that declared {variable.name} could not check it: {first_line(error)}."
        raise InvalidArgument(
            "environment", variable.name, got=repr(value), expected=variable.expected, remedy=remedy
        ) from error


def set_variables(environ: Mapping[str, str], variables: Iterable[Variable]) -> tuple[tuple[str, str], ...]:
    """(name, value) of the core's variables and of `variables` that are set, sorted."""
    known = (*core_variables(), *variables)
    return tuple(sorted((each.name, value) for each in known if (value := value_of(environ, each.name))))
