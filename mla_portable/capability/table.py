# SPDX-License-Identifier: Apache-2.0
"""Make the matrix: what would run on each device by default, whether it is proven there, and how fast it is.

It follows from declarations, measured costs, profiles and what runs prove, which matrix.json of a folder of records says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from mla_portable.capability.matrix import (
    DATA,
    NOT_RUN,
    UNPUBLISHED,
    Cell,
    Device,
    Matrix,
    Proof,
    RunLine,
    States,
    proven_by_ci,
    read_matrix,
)
from mla_portable.capability.model import RecordError
from mla_portable.capability.profiles import Profile, all_profiles
from mla_portable.capability.run import SUFFIX
from mla_portable.choose import Registry
from mla_portable.contracts import DeviceFacts, Primitive, Request
from mla_portable.primitives import (
    CACHE_WRITE,
    CONVERT_INDICES,
    GATHER_UPCONVERT,
    INDEXER_SELECT,
    SPARSE_DECODE,
    SPARSE_PREFILL,
)

_REFERENCE: Final = "reference.torch"
Recorded = tuple[Sequence[RunLine], Sequence[Proof]]
"""Runs, in short, and what they prove."""


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
                **primitive.promises,
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


def make_matrix(folder: Path, registry: Registry | None = None, recorded: Recorded | None = None) -> Matrix:
    """The matrix of everything that is installed, or of `registry`.

    Args:
        folder: of records; its profiles count beside those that ship. recorded: default: what matrix.json of the folder names,
            nothing where there is no such file.
    Raises: RecordError, also where the folder has runs and no matrix.json.
    """
    registry = registry or Registry(environ={}, probe=False, costs="measured")
    profiles = all_profiles(folder)
    runs, proofs = recorded or _recorded(folder)
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


def _recorded(folder: Path) -> Recorded:
    if (folder / DATA).is_file():
        known = read_matrix(folder)
        return known.runs, known.proofs
    if any(folder.glob(f"*/*{SUFFIX}")):
        remedy = f"`ci/release/matrix.py --records {folder}` of a checkout of mla_portable makes it of them"
        raise RecordError(str(folder), f"has runs and no {DATA}; {remedy}")
    return (), ()


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
