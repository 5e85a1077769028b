# SPDX-License-Identifier: Apache-2.0
"""Predicted times: what a kernel that was timed on one device would take on others, from their published rates.

`predicted.toml` among the records has the times. A prediction is no evidence, ranks nothing and moves no level.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field, ValidationError

from mla_portable.layouts import FP8_DS_MLA, HEAD_SIZE, KV_LORA_RANK
from mla_portable.tools.matrix.model import Model, Positive, RecordError, Text, validation_problems
from mla_portable.tools.matrix.profiles import Profile, Rate, read_toml

FILE: Final = "predicted.toml"
_REACHED: Final = 7 / 8
"""Of a published rate. A copy reaches 4.2 of an H200's 4.8 TB/s."""


class Timed(Model):
    """Times of one decode kernel on the FP8 cache.

    Attributes:
        implementation: whose kernel. device: slug of the profile where it was timed. devices: slugs to predict for.
        rows, topk: of the decode. launch_us: of a graph that does nothing, a part of every time.
        us: query heads -> median. source: where the times are published.
    """

    implementation: Text
    device: Text
    devices: tuple[Text, ...] = Field(strict=False)
    rows: Positive
    topk: Positive
    launch_us: Rate
    us: dict[Annotated[int, Field(ge=1, strict=False)], Rate]
    source: Text

    @property
    def title(self) -> str:
        """What is predicted, and from what."""
        what = f"Decode of {self.rows} rows, {self.topk:,} keys each, on the FP8 cache by {self.implementation}"
        return f"{what}, from its times on another device ({self.source})."


@dataclass(frozen=True, slots=True)
class Predicted:
    """Microseconds: of the bytes at the device's bandwidth, of the products at its tensor rate, of the clocks that the kernel's
    instructions took, and of the call: the largest of them and the launch."""

    bytes_us: float
    products_us: float
    clocks_us: float
    us: float


def read_timed(folder: Path) -> Timed | None:
    """What a folder of records has to predict from; None where it has nothing. Raises: RecordError."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        return Timed.model_validate(read_toml(path, str(path)))
    except ValidationError as error:
        raise RecordError(str(path), "; ".join(validation_problems(error))) from error


def predict(timed: Timed, heads: int, measured_on: Profile, device: Profile) -> Predicted:
    """For a decode of `timed` with so many heads.

    The clocks of the kernel's instructions are taken from its time where it was measured, less the launch: every multiprocessor
    is assumed to need as many on `device`. Raises: RecordError where a profile lacks a rate.
    """
    keys = timed.rows * timed.topk
    moved = keys * FP8_DS_MLA.row_bytes + 2 * timed.rows * heads * (HEAD_SIZE + KV_LORA_RANK)
    operations = 2 * keys * heads * (HEAD_SIZE + KV_LORA_RANK)
    bytes_us = moved / (_REACHED * 1e6 * _rate(device, "memory_tb_per_s"))
    products_us = operations / (_REACHED * 1e6 * _rate(device, "bf16_tflops"))
    clocks_us = (timed.us[heads] - timed.launch_us) * _clocks(measured_on) / _clocks(device)
    return Predicted(bytes_us, products_us, clocks_us, timed.launch_us + max(bytes_us, products_us, clocks_us))


def predicted_lines(timed: Timed | None, profiles: Mapping[str, Profile]) -> tuple[tuple[str, ...], ...]:
    """(device, heads, bytes, products, clocks, predicted), in microseconds, of each device and head count; see `Table`.

    Raises: RecordError for a device without a profile, or whose profile lacks a rate.
    """
    if timed is None:
        return ()
    unknown = [slug for slug in (timed.device, *timed.devices) if slug not in profiles]
    if unknown:
        raise RecordError(FILE, f"{', '.join(unknown)}: no such profile")
    found: list[tuple[str, ...]] = []
    for device in map(profiles.__getitem__, timed.devices):
        for heads in timed.us:
            each = predict(timed, heads, profiles[timed.device], device)
            parts = (each.bytes_us, each.products_us, each.clocks_us, each.us)
            found.append((f"{device.name} ({device.arch})", str(heads), *(f"{us:.0f}" for us in parts)))
    return tuple(found)


def _clocks(profile: Profile) -> float:
    """Clocks of all multiprocessors in a microsecond."""
    return 1e3 * _rate(profile, "clock_ghz") * _rate(profile, "num_sms")


def _rate(profile: Profile, fact: str) -> float:
    value = getattr(profile.facts, fact)
    if value is None:
        raise RecordError(f"profile {profile.slug}", f"a predicted time needs {fact}")
    return float(value)
