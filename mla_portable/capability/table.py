# SPDX-License-Identifier: Apache-2.0
"""Make the matrix: what would run on each device by default, whether it is proven there, and how fast it is.

It follows from runs, profiles, declarations and measured costs; `mla-portable matrix --write` writes its files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from mla_portable.capability.claims import proven_by_ci
from mla_portable.capability.matrix import (
    DATA,
    NOT_RUN,
    PAGE,
    UNPUBLISHED,
    Cell,
    Device,
    Matrix,
    Proof,
    RunLine,
    States,
    matrix_text,
    page,
    read_matrix,
)
from mla_portable.capability.profiles import Profile, all_profiles, profile_of
from mla_portable.capability.proofs import proofs_of, results_of
from mla_portable.capability.run import SUFFIX, Comparison, Run, runs_in
from mla_portable.capability.suite import TodaysSuite, suite_of_release
from mla_portable.contracts import DeviceFacts, Primitive, Request
from mla_portable.primitives import (
    CACHE_WRITE,
    CONVERT_INDICES,
    GATHER_UPCONVERT,
    INDEXER_SELECT,
    SPARSE_DECODE,
    SPARSE_PREFILL,
)
from mla_portable.registry import Registry

_REFERENCE: Final = "reference.torch"


class Column(NamedTuple):
    """What a column asks for: 64 heads and 2,048 indices per row on a cache of blocks of 64, with the rows that it names."""

    title: str
    rows: int
    calls: tuple[tuple[Primitive[Any], str | None], ...]

    @property
    def heading(self) -> str:
        """With the size that its times are of."""
        return self.title if len(self.calls) > 1 else f"{self.title}, {self.rows:,} rows"

    def requests(self, device: DeviceFacts) -> list[Request]:
        """What a layer in an engine asks of the registry."""
        return [
            Request(
                primitive,
                device,
                kv_layout=layout,
                num_heads=64 if "num_heads" in primitive.facts else None,
                topk=2048 if "topk" in primitive.facts else None,
                block_size=64 if "block_size" in primitive.facts and (primitive, layout) != (SPARSE_PREFILL, "bf16") else None,
                query_len=1 if "query_len" in primitive.facts else None,
                scale_format="pow2" if layout in ("fp8_ds_mla", "index_fp8") else None,
                rows=self.rows,
            )
            for primitive, layout in self.calls
        ]


COLUMNS: Final = (
    Column("decode FP8", 128, ((SPARSE_DECODE, "fp8_ds_mla"),)),
    Column("decode BF16", 128, ((SPARSE_DECODE, "bf16"),)),
    Column("prefill", 1024, ((SPARSE_PREFILL, "bf16"),)),
    Column("indexer", 64, ((INDEXER_SELECT, "index_fp8"),)),
    Column("cache operations", 128, ((CACHE_WRITE, "fp8_ds_mla"), (CONVERT_INDICES, None), (GATHER_UPCONVERT, "fp8_ds_mla"))),
)


def read_runs(folder: Path, registry: Registry, profiles: Mapping[str, Profile]) -> tuple[list[RunLine], list[Proof]]:
    """The runs of a folder of records, and what they prove. Raises: RecordError."""
    runs = list(runs_in(folder))
    today = TodaysSuite(registry.implementations(), profiles)
    proofs: list[Proof] = []
    for each in results_of([run for _, run in runs], profiles):
        proofs += proofs_of(each, suite_of_release(folder / each.release, today))
    return [_run_line(path.name, run, profiles) for path, run in runs], proofs


def _run_line(file: str, run: Run, profiles: Mapping[str, Profile]) -> RunLine:
    passed = sum(case.status == "passed" for case in run.cases)
    judged = [each for each in run.comparisons if each.passed is not None]
    suites = sorted({f"{each.engine}: {each.suite}" for each in judged})
    agreed = f"{'; '.join(suites)}: {sum(bool(each.passed) for each in judged)} of {len(judged)}" if judged else ""
    return RunLine(
        file=file,
        release=run.release,
        device=profile_of(run.device_name, profiles).slug,
        target=run.target or "",
        level=run.level,
        passed=passed,
        failed=len(run.cases) - passed,
        times=len(run.times),
        comparisons=agreed,
        failed_comparisons=tuple(_failed(judged)),
        commit=run.commit,
        dirty=None if run.dirty is None else bool(run.dirty),
        date=run.date,
        who=run.who,
    )


def _failed(judged: Sequence[Comparison]) -> Iterator[str]:
    """For each engine, suite and first word of a name with a comparison that failed: how many, and what the first one found."""
    groups: dict[tuple[str, str, str], list[Comparison]] = {}
    for each in judged:
        groups.setdefault((each.engine, each.suite, each.name.partition("-")[0]), []).append(each)
    for (engine, suite, name), of_group in groups.items():
        failed = [each for each in of_group if not each.passed]
        if failed:
            first = f"`{failed[0].name}` {failed[0].text}"
            yield f"{engine}, {suite}: {len(failed)} of {len(of_group)} of {name}; {first}"


def make_matrix(folder: Path, registry: Registry | None = None) -> Matrix:
    """The matrix of a folder of records, and of everything that is installed or of `registry`. Raises: RecordError."""
    registry = registry or Registry(environ={}, probe=False, costs="measured")
    profiles = all_profiles(folder)
    has_runs = any(folder.glob(f"*/*{SUFFIX}")) or not (folder / DATA).is_file()
    known = None if has_runs else read_matrix(folder)
    runs, proofs = (known.runs, known.proofs) if known else read_runs(folder, registry, profiles)
    devices = sorted((each for each in profiles.values() if each.device_type != "cpu"), key=_order)
    offered = sorted({(each.name, str(each.primitive)) for each in registry.implementations()})
    ci = {entry: archs for entry, archs in proven_by_ci().items() if tuple(entry.split(" / ")) in offered}
    return Matrix(
        plugins=tuple(sorted((each.name, each.distribution, each.version) for each in registry.plugin_reports)),
        implementations=tuple(offered),
        layouts=tuple(sorted({layout for primitive in Primitive.all() for layout in primitive.layouts})),
        columns=tuple(column.heading for column in COLUMNS),
        ci=ci,
        devices=tuple(_device(each, registry, states_on(each, proofs, ci, profiles)) for each in devices),
        runs=tuple(runs),
        proofs=tuple(proofs),
    )


def _order(profile: Profile) -> tuple[bool, str, int, str, str]:
    """NVIDIA first; architectures of a vendor from old to new."""
    return profile.vendor != "nvidia", profile.vendor, len(profile.arch), profile.arch, profile.slug


def states_on(
    profile: Profile, proofs: Sequence[Proof], ci: Mapping[str, Sequence[str]], profiles: Mapping[str, Profile]
) -> States:
    """What is known on a device."""
    return States(profile.slug, profile.arch, proofs, ci, {each.slug: each.short_name for each in profiles.values()})


def _device(profile: Profile, registry: Registry, states: States) -> Device:
    facts = profile.device_facts()
    cells = tuple(_cell(column.requests(facts), registry, states, profile) for column in COLUMNS)
    return Device(
        slug=profile.slug, name=profile.name, short=profile.short_name, vendor=profile.vendor, arch=profile.arch, cells=cells
    )


def _cell(requests: Sequence[Request], registry: Registry, states: States, profile: Profile) -> Cell:
    """Of several calls the names and states that differ, each once."""
    chosen: dict[str, dict[str, None]] = {}
    us: float | None = None
    for request in requests:
        name = would_run(registry, request)
        state = states.of(name, str(request.primitive), request.kv_layout) if name else NOT_RUN
        if name in ("", _REFERENCE) and profile.unknown_facts:
            name, state = "", UNPUBLISHED
        chosen.setdefault(name, {})[state] = None
        if name and len(requests) == 1:
            offered = next(each for each in registry.implementations(request.primitive) if each.name == name)
            us = registry.times(offered, request).get(request.rows or 0)
    state = " / ".join(dict.fromkeys(state for states_of in chosen.values() for state in states_of))
    return Cell(implementation=" + ".join(filter(None, chosen)), state=state, us=us)


def would_run(registry: Registry, request: Request) -> str:
    """The implementation that is chosen by default, by declarations and measured costs; "" where nothing can serve."""
    return registry.decide(request, probe=False).chosen or ""


def generated(folder: Path, registry: Registry | None = None) -> dict[Path, str]:
    """Path -> what should stand there."""
    matrix = make_matrix(folder, registry)
    return {folder / DATA: matrix_text(matrix), folder / PAGE: page(matrix)}
