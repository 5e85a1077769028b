# SPDX-License-Identifier: Apache-2.0
"""From a line of the kernel benchmark to evidence."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from acme_records import acme_claim
from reporting import PROFILES, derived

from mla_portable.sources import source_hash
from mla_portable.tools.matrix.claims import Declarations
from mla_portable.tools.matrix.derive import baselines_of, unfit
from mla_portable.tools.matrix.evidence import Evidence, problems_of
from mla_portable.tools.matrix.levels import Hashes
from mla_portable.tools.matrix.model import RecordError
from mla_portable.tools.matrix.record import benchmark_report
from mla_portable.tools.matrix.trust import Trust
from mla_portable.tools.matrix.words import REPRODUCED, SELF_REPORTED, SIGNED

OLD = "b" * 64
SUPPORT = {"source": "this test", "device_types": ["cuda"], "kv_layouts": ["fp8_ds_mla"], "lse": True}
SOURCES = ("mla_portable.layouts.base",)
HASH = source_hash(SOURCES)
HASHES = Hashes({("acme.v1", "sparse_decode", profile.arch): HASH for profile in PROFILES.values()}, {})

claim = partial(acme_claim, sources=SOURCES, targets=(), support=SUPPORT, devices=dict.fromkeys(PROFILES, ()))


DECLARED = Declarations((claim(),))
HEADER: dict[str, Any] = {
    "kind": "kernel_run",
    "schema": 3,
    "recorded": "2026-11-02T10:00:00Z",
    "command": "mla-portable bench kernels",
    "machine": "0123456789abcdef",
    "commit": "0123456789" * 4,
    "changed": {},
    "files": None,
    "device": {"name": "NVIDIA H200", "arch": "sm90", "vendor": "nvidia"},
    "driver": "580.1",
    "versions": {"python": "3.12", "torch": "2.11"},
    "clocks": {"clocks.sm": 1980.0},
    "ceilings": {"bytes_per_second": 4.3e12, "flops_per_second": 7.9e14, "copy_bytes": 1, "side": 1},
    "tuned": False,
}


def line(name: str = "acme.v1", us: float | None = 50.0, **changes: Any) -> dict[str, Any]:
    ours = name.startswith("acme")
    return {
        "device": {"name": "NVIDIA H200", "arch": "sm90", "vendor": "nvidia"},
        "primitive": "sparse_decode",
        "layout": "fp8_ds_mla",
        "heads": 16,
        "topk": 2048,
        "rows": 64,
        "overlap": 0,
        "shape": "B 64, S 1, H 16, K 2048",
        "bytes": 86_000_000,
        "flops": 1000,
        "bound_us": 20.0,
        "name": name,
        "role": "implementation" if ours else "baseline",
        "source_hash": HASH if ours else None,
        "wrong": [],
        "failure": "",
        "median_us": us,
        "p10_us": us,
        "p90_us": us,
        "runs": 30,
    } | changes


BASELINES = [line("other.slow", 90.0), line("other.fast", 80.0), line("other.wrong", None, wrong=["out[0]"])]


def report(*lines: dict[str, Any], **header: Any) -> dict[str, Any]:
    return benchmark_report(HEADER | header, lines, DECLARED)


def records(*lines: dict[str, Any], **header: Any) -> list[dict[str, Any]]:
    return derived(report(*lines, **header))


def evidence(*made: dict[str, Any]) -> list[Evidence]:
    for record in made:
        assert problems_of(record, PROFILES) == []
    return [Evidence(f"test:{number}", record) for number, record in enumerate(made, 1)]


# ---------------------------------------------------------------------- evidence


def test_a_time_beside_its_best_baseline_is_evidence():
    (record,) = records(line(), *BASELINES)
    assert problems_of(record, PROFILES) == []
    assert record["baseline"] == {"name": "other.fast", "median_us": 80.0}
    assert record["bound"] == {"name": "copy at 4.3 TB/s, bf16 product at 790 TFLOP/s", "median_us": 20.0}
    assert record["device"] == {"profile": "h200", "name": "NVIDIA H200", "arch": "sm90"}
    assert (record["heads"], record["topk"], record["rows"], record["median_us"]) == ([16], [2048], 64, 50.0)
    assert (record["source_hash"], record["recorded"], record["commit"]) == (HASH, HEADER["recorded"], HEADER["commit"])


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([line()], "no baseline was timed in the same run"),
        ([line(), line("other.fast", 80.0, shape="B 4")], "no baseline was timed in the same run"),
        ([line(us=None, wrong=["out[0]: got 1"]), *BASELINES], "out[0]: got 1"),
        ([line(us=None, failure="RuntimeError: no"), *BASELINES], "RuntimeError: no"),
        ([line(source_hash=None), *BASELINES], "in no module"),
    ],
)
def test_what_is_no_evidence_is_left_out_with_the_reason(lines, why):
    assert records(*lines) == []
    assert why in unfit(lines[0], baselines_of(lines))


def test_what_cannot_be_evidence_is_refused():
    with pytest.raises(RecordError, match="no plugin here declares it"):
        records(line("acme.v2"), *BASELINES)
    with pytest.raises(RecordError, match="other sources"):
        records(line(source_hash=OLD), *BASELINES)
    with pytest.raises(RecordError, match="a table of the user's"):
        records(line(), *BASELINES, tuned=True)
    with pytest.raises(RecordError, match="no profile matches"):
        records(line(), *BASELINES, device={"name": "NVIDIA H201", "arch": "sm90", "vendor": "nvidia"})


# ---------------------------------------------------------------------- trust


def on(day: int, us: float = 50.0, **header: Any) -> dict[str, Any]:
    """The record of a run of that day."""
    return records(line(us=us), *BASELINES, recorded=f"2026-11-{day:02}T10:00:00Z", **header)[0]


@pytest.mark.parametrize(
    ("other", "trust", "ships"),
    [
        (on(3), REPRODUCED, True),
        (on(2, machine="f" * 16), REPRODUCED, True),
        (on(3, 54.9), REPRODUCED, True),
        (on(3, 55.1), SELF_REPORTED, False),
        (on(2), SELF_REPORTED, False),
        (on(3) | {"source_hash": OLD}, SELF_REPORTED, False),
        (on(2) | {"signer": "runner@example.invalid"}, SELF_REPORTED, False),
        (on(3, 5.0) | {"signer": "runner@example.invalid"}, SELF_REPORTED, False),
    ],
    ids=["day", "machine", "within the limit", "beyond it", "the same run", "other sources", "signed", "signed, 10 x"],
)
def test_a_time_is_reproduced_when_another_run_agrees(other, trust, ships):
    first, second = evidence(on(2), other)
    found = Trust([first, second])
    assert (found.of(first), found.ships(first)) == (trust, ships)
    signed = Evidence("", first.data | {"signer": "runner@example.invalid"})
    assert Trust([signed]).of(signed) == SIGNED and Trust([signed]).ships(signed)
