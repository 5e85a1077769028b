# SPDX-License-Identifier: Apache-2.0
"""Adding to a file of times: the file is replaced as a whole, by one writer at a time."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path

from mla_portable.contracts import InvalidArgument
from mla_portable.kit.whole_files import replace_file
from mla_portable.times.files import TimesFile, parse_times, times_text
from mla_portable.times.prompts import PromptRecord
from mla_portable.times.records import MeasuredTime, Measurement

logger = logging.getLogger("mla_portable.times")


def check_can_add(where: str, path: Path, device: str) -> None:
    """A file, if it is there, has no times of another device. Raises: InvalidArgument, OSError.

    Args:
        where: the command, for the message. device: its name, as its driver reports it.
    """
    there = _read(path)
    for each in () if there is None else _measurements(there):
        if not each.matches(device):
            expected = f"times of {device}: a file is of one device"
            raise InvalidArgument(
                where, str(path), got=f"times of {each.device}", expected=expected, remedy="Name another file."
            )


def add_to_file(path: Path, times: Sequence[MeasuredTime] = (), prompts: Sequence[PromptRecord] = ()) -> Path | None:
    """Add records of one device to a file, each in the place of those for the same call.

    Processes that write at the same time take turns, by a lock on a file beside it, so that the records of all are kept. What
    the file calls the device, and the vendors that it stands for, stay. A file of which something cannot be used is kept beside
    the new one.

    Returns: where that file was kept, None where there was none. Raises: OSError; ValueError for records of another device.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _beside(path, ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        except OSError as error:
            logger.warning("%s is written without a lock, which its file system does not have: %s", path, error)
        there = _read(path) or TimesFile(path.name)
        origin = next(iter(_measurements(there)), None)
        if origin is not None:
            times = [replace(each, measurement=_named_as(origin, each.measurement)) for each in times]
            prompts = [replace(each, measurement=_named_as(origin, each.measurement)) for each in prompts]
        if there.prompts:
            prompts = [replace(each, stands_for=there.prompts[0].stands_for) for each in prompts]
        replaced = {*map(_call_of_time, times), *map(_call_of_prompts, prompts)}
        kept = [each for each in there.times if _call_of_time(each) not in replaced]
        kept_prompts = [each for each in there.prompts if _call_of_prompts(each) not in replaced]
        text = times_text([*kept, *times], [*kept_prompts, *prompts], there.baselines)
        damaged = path.replace(_beside(path, ".damaged")) if there.problems else None
        replace_file(path, text.encode())
    return damaged


def _read(path: Path) -> TimesFile | None:
    try:
        return parse_times(path.read_text(encoding="utf-8"), name=path.name)
    except FileNotFoundError:
        return None
    except ValueError as error:  # not UTF-8
        return TimesFile(path.name, problems=(str(error),))


def _measurements(file: TimesFile) -> list[Measurement]:
    return [each.measurement for each in (*file.times, *file.prompts, *file.baselines)]


def _named_as(there: Measurement, added: Measurement) -> Measurement:
    """`added` under the name that the file has for its device. Raises: ValueError for another device."""
    if not there.matches(added.device):
        raise ValueError(f"a file of times is of one device; it has {there.device}, got {added.device}")
    return replace(added, device=there.device, names=there.names)


def _call_of_time(time: MeasuredTime) -> Hashable:
    """A tuned kernel has one configuration for all numbers of rows."""
    rows = time.rows if time.configuration is None else None
    return time.implementation, time.primitive, time.layout, time.heads, time.topk, time.form, rows


def _call_of_prompts(record: PromptRecord) -> Hashable:
    return record.implementation, record.qk_head_dim, record.v_head_dim, record.heads


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)
