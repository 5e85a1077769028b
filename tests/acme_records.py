# SPDX-License-Identifier: Apache-2.0
"""Records of an invented vendor: devices, a claim, and evidence as a careful recorder would write it. Tests spoil one thing."""

from __future__ import annotations

from typing import Any

from mla_portable.tools.matrix.claims import Claim
from mla_portable.tools.matrix.evidence import Evidence, problems_of
from mla_portable.tools.matrix.levels import Cell, Hashes, evaluate
from mla_portable.tools.matrix.profiles import Profile, parse_profile

NOW, OLD, SUITE = "a" * 64, "b" * 64, "c" * 64
COMMIT = "0123456789" * 4
REPORT = "d" * 64
SUPPORT = {"source": "a data sheet", "device_types": ["cuda", "cpu"], "kv_layouts": ["bf16"], "max_heads": 128, "lse": True}
FACTS = {"shared_memory": 1000, "has_bf16": True, "has_fp8_conversion": True}


def profile(slug: str, arch: str, pattern: str, **changes: Any) -> Profile:
    table = {"name": slug, "vendor": "acme", "arch": arch, "device_type": "cuda", "pattern": pattern, "facts": FACTS} | changes
    return parse_profile(slug, table | {"sources": dict.fromkeys(["arch", *table["facts"]], "a data sheet")})


PROFILES = {
    "big": profile("big", "sm90", "Acme Big"),
    "odd": profile("odd", "xy1", "Acme Odd"),
    "cpu": profile("cpu", "cpu", "CPU .*", vendor="cpu", device_type="cpu"),
}


def acme_claim(**values: Any) -> Claim:
    """One implementation of sparse_decode that compiles for sm90; values: the fields that a test is about."""
    fields: dict[str, Any] = {
        "implementation": "acme.v1",
        "primitive": "sparse_decode",
        "plugin": "acme",
        "module": "acme",
        "distribution": "acme",
        "version": "1",
        "preference": 10.0,
        "core": False,
        "sources": ("acme",),
        "targets": ("sm90",),
        "support": SUPPORT,
        "devices": {"big": (), "odd": (), "cpu": ()},
    }
    return Claim(**(fields | values))


def common(kind: str, **changes: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "kind": kind,
        "report": REPORT,
        "machine": "0123456789abcdef",
        "recorded": "2026-11-01T00:00:00Z",
        "implementation": "acme.v1",
        "primitive": "sparse_decode",
        "provider": {"distribution": "acme", "version": "1"},
        "versions": {"python": "3.11"},
        "commit": COMMIT,
        "dirty": False,
        "source_hash": NOW,
        "support": SUPPORT,
        "command": "make it so",
    } | changes


def cases(passed: int, failed: int = 0, skipped: int = 0) -> dict[str, int]:
    return {"passed": passed, "failed": failed, "skipped": skipped}


def compiled(**changes: Any) -> dict[str, Any]:
    usage = {"variants": 3, "shared": 800, "registers": 64, "spilled": 0}
    own = {"target": "sm90", "shared_memory_limit": 1000, "kernels": {"a_kernel": usage}, "failures": []}
    return common("compiled", **own, cases=cases(3)) | changes


def on_big(kind: str, **values: Any) -> dict[str, Any]:
    device = {"profile": "big", "name": "Acme Big", "arch": "sm90"}
    return common(kind, layout="bf16", device=device, driver="1.0", heads=[16], topk=[64], **values)


def conformance(**changes: Any) -> dict[str, Any]:
    errors = {"out": {"error": 1e-3, "tolerance": 1e-2, "case": "one"}}
    own = {"mode": "native", "level": "quick", "match": "", "suite_hash": SUITE, "cases": cases(9), "errors": errors}
    return on_big("conformance", **own) | changes


def interpreted(**changes: Any) -> dict[str, Any]:
    device = {"profile": "cpu", "name": "CPU x86_64", "arch": "cpu"}
    return conformance(mode="interpreter", device=device, driver=None) | changes


def benchmark(median_us: float = 100.0, **changes: Any) -> dict[str, Any]:
    own = {
        "shape": "B 64",
        "median_us": median_us,
        "p10_us": 0.99 * median_us,
        "p90_us": 1.01 * median_us,
        "runs": 30,
        "bound": {"name": "copy of the bytes", "median_us": 50.0},
        "baseline": {"name": "other.v1", "median_us": 120.0},
        "rows": 64,
        "overlap": 0,
    }
    return on_big("benchmark", **own) | changes


ALL = (compiled(), interpreted(), conformance(), benchmark())


def day(number: int) -> dict[str, str]:
    """When a record was made, and the report of that day."""
    return {"recorded": f"2026-11-{number:02}T00:00:00Z", "report": f"{number:064x}"}


def evidence(*records: dict[str, Any]) -> list[Evidence]:
    for record in records:
        assert problems_of(record, PROFILES) == []
    return [Evidence(f"test:{number}", record) for number, record in enumerate(records, 1)]


def hashes(sources: str = NOW, suite: str = SUITE) -> Hashes:
    return Hashes({("acme.v1", "sparse_decode", arch): sources for arch in ("sm90", "xy1", "cpu")}, {"sparse_decode": suite})


def cells(*records: dict[str, Any], claimed: Claim | None = None, sources: str = NOW) -> dict[str, Cell]:
    found = evaluate([claimed or acme_claim()], evidence(*records), hashes(sources), PROFILES)
    return {cell.device: cell for cell in found}
