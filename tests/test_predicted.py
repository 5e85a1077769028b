# SPDX-License-Identifier: Apache-2.0
"""Predicted times: the largest of bytes, products and clocks, from published rates; never evidence."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla_portable.tools.matrix.model import RecordError
from mla_portable.tools.matrix.predicted import FILE, Timed, predict, predicted_lines, read_timed
from mla_portable.tools.matrix.profiles import Profile
from mla_portable.tools.matrix.records import read_profiles

CAPABILITY = Path(__file__).parents[1] / "capability"
TIMED = Timed(
    implementation="acme.v1",
    device="old",
    devices=("new",),
    rows=100,
    topk=1000,
    launch_us=5.0,
    us={16: 105.0},
    source="a test",
)


def profile(slug: str, **facts: float | None) -> Profile:
    rates = {"num_sms": 100, "memory_tb_per_s": 1.0, "bf16_tflops": 1000.0, "clock_ghz": 2.0} | facts
    sources = {name: "a test" for name, value in rates.items() if value is not None} | {"arch": "a test"}
    values = {"name": slug, "vendor": "acme", "arch": "a1", "device_type": "cuda", "pattern": slug, "sources": sources}
    return Profile.model_validate({"slug": slug, "facts": rates, **values})


OLD = profile("old")


@pytest.mark.parametrize(
    ("facts", "bound", "us"),
    [
        ({"num_sms": 50}, "clocks_us", 5 + 200),
        ({"clock_ghz": 1.0}, "clocks_us", 5 + 200),
        ({"memory_tb_per_s": 0.1}, "bytes_us", 5 + (100 * 1000 * 656 + 2 * 100 * 16 * 1088) / 0.0875e6),
        ({"bf16_tflops": 10.0}, "products_us", 5 + 2 * 100 * 1000 * 16 * 1088 / 8.75e6),
    ],
)
def test_the_largest_bound_decides(facts, bound, us):
    found = predict(TIMED, 16, OLD, profile("new", **facts))
    assert found.us == pytest.approx(us) and getattr(found, bound) == pytest.approx(us - 5)
    assert getattr(found, bound) == max(found.bytes_us, found.products_us, found.clocks_us)


def test_a_device_without_a_rate_is_refused():
    assert predicted_lines(None, {}) == ()
    assert predicted_lines(TIMED, {"old": OLD, "new": OLD}) == (("old (a1)", "16", "79", "4", "100", "105"),)
    with pytest.raises(RecordError, match="profile new: a predicted time needs clock_ghz"):
        predicted_lines(TIMED, {"old": OLD, "new": profile("new", clock_ghz=None)})
    with pytest.raises(RecordError, match=f"{FILE}: new: no such profile"):
        predicted_lines(TIMED, {"old": OLD})


def test_a_malformed_file_is_refused(tmp_path):
    assert read_timed(tmp_path) is None
    (tmp_path / FILE).write_text("rows = 0\n", encoding="utf-8")
    with pytest.raises(RecordError, match="rows: Input should be greater than or equal to 1"):
        read_timed(tmp_path)


def test_what_ships_is_predicted_and_says_so():
    timed = read_timed(CAPABILITY)
    assert timed is not None
    lines = predicted_lines(timed, read_profiles(CAPABILITY))
    assert len(lines) == len(timed.devices) * len(timed.us)
    text = (CAPABILITY / "MATRIX.md").read_text(encoding="utf-8")
    assert "**Predicted, not measured**" in text and all(f"| {' | '.join(line)} |" in text for line in lines)
