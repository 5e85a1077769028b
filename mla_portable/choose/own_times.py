# SPDX-License-Identifier: Apache-2.0
"""A user's own times: a folder of files beside those that plugins ship, in the same format.

`mla-portable bench costs` and `bench prompts` make files for it, `tune` keeps its configurations there. The registry reads the
folder once, beside the policy. A file of times is a hint, so one that cannot be used is described and the rest counts.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from mla_portable.choose.settings import ENV_TIMES, ENV_TUNED, path_of, read_text_file, value_of
from mla_portable.times.files import OLD_TABLE, TimesFile, parse_times

_DEFAULT: Final = Path("mla-portable") / "times"
_OLD_TABLE: Final = Path("mla-portable") / "tuned.json"
_REMEDY: Final = f"correct or delete it; `mla-portable bench` and `tune` write others; {ENV_TIMES} names another folder"
_TUNE_AGAIN: Final = f"run `mla-portable tune` again, which writes to the folder of {ENV_TIMES}; then"

logger = logging.getLogger("mla_portable.choose")


def times_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """Where the files are, or would be: MLA_PORTABLE_TIMES, else mla-portable/times among the user's configuration.

    None where neither MLA_PORTABLE_TIMES, XDG_CONFIG_HOME nor HOME is set.
    """
    environ = os.environ if environ is None else environ
    named = path_of(environ, ENV_TIMES)
    if named is not None:
        return named
    configuration = _configuration_folder(environ)
    return None if configuration is None else configuration / _DEFAULT


def tuned_file(folder: Path, device: str) -> Path:
    """Where `mla-portable tune` keeps what it found for a device of that name."""
    return folder / f"tuned-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')[:100] or 'device'}.json"


class Ignored(NamedTuple):
    """What of a user's times is ignored and why, and what to do."""

    what: str
    remedy: str


@dataclass(frozen=True, slots=True)
class OwnTimes:
    """What the folder holds.

    Attributes:
        files: those of which something can be used, named by their paths, of installed implementations alone.
    """

    files: tuple[TimesFile, ...] = ()
    ignored: tuple[Ignored, ...] = ()

    @classmethod
    def read(cls, environ: Mapping[str, str], offered: Collection[tuple[str, str]]) -> OwnTimes:
        """Every "*.json" of the folder, sorted by name.

        A default folder that cannot be read (HOME of another user, no HOME) holds nothing, which is logged. A folder that does
        not exist yet holds nothing either.

        Args:
            offered: (implementation, primitive) of all plugins. Times of others are left alone: their plugin may be disabled.
        """
        folder, named = times_folder(environ), bool(value_of(environ, ENV_TIMES))
        ignored = list(_of_older_releases(environ))
        try:
            found = [] if folder is None else sorted(path for path in folder.iterdir() if path.suffix == ".json")
        except FileNotFoundError:
            found = []
            if named:
                logger.warning("%s names %s, which does not exist: there are no times of your own", ENV_TIMES, folder)
        except (OSError, ValueError) as error:
            found = []
            if named:
                ignored.append(Ignored(f"{folder}: {error}", _REMEDY))
            else:
                logger.info("no times of your own: %s", error)
        files: list[TimesFile] = []
        for path in found:
            try:
                file = parse_times(read_text_file(path), name=str(path))
            except (OSError, ValueError) as error:
                file = TimesFile(str(path), problems=(str(error),))
            if file.problems:
                first, *others = file.problems
                what = f"{path}: {first}" + (f", and {len(others)} more like this" if others else "")
                ignored.append(Ignored(what, f"{_TUNE_AGAIN} delete it" if first == OLD_TABLE else _REMEDY))
            times = tuple(each for each in file.times if (each.implementation, each.primitive) in offered)
            if times or file.prompts or file.baselines:
                files.append(replace(file, times=times))
        return cls(tuple(files), tuple(ignored))


def _of_older_releases(environ: Mapping[str, str]) -> Iterator[Ignored]:
    """Tuning tables of release 0.2 and older, and the variable that named one."""
    if value_of(environ, ENV_TUNED):
        yield Ignored(f"{ENV_TUNED} is set, which is no longer read", f"{_TUNE_AGAIN} unset it")
    folder = _configuration_folder(environ)
    try:
        there = folder is not None and (folder / _OLD_TABLE).is_file()
    except OSError:
        return
    if folder is not None and there:
        yield Ignored(f"{folder / _OLD_TABLE}: {OLD_TABLE}", f"{_TUNE_AGAIN} delete it")


def _configuration_folder(environ: Mapping[str, str]) -> Path | None:
    folder, home = value_of(environ, "XDG_CONFIG_HOME"), value_of(environ, "HOME")
    if folder:
        return Path(folder)
    return Path(home) / ".config" if home else None
