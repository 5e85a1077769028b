# SPDX-License-Identifier: Apache-2.0
"""Run once what engines run, so that every kernel that a device serves with is compiled and in the caches on disk.

Triton names what it keeps by the arguments of a call (types, alignment, constants, options), the compiler and the target, so
calls of every kind are made on the device. CUDA sources of plugins are compiled when their implementations are bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.accelerator import accelerator
from mla_portable.attention import HeadDims, PromptAttention, SparseMLAAttention
from mla_portable.attention.layer_registry import LayerRegistry
from mla_portable.bench.kernels import Progress
from mla_portable.choose import Registry
from mla_portable.contracts import DeviceFacts, UnsupportedRequest
from mla_portable.engines.common.asked import indexer_requests, layer_spec
from mla_portable.engines.common.routing import in_words, pairs, served_by
from mla_portable.engines.common.warm_up import warm_indexer, warm_layer, warm_prompts
from mla_portable.layouts import INDEX_FP8, INDEX_HEAD_SIZE, LAYOUTS
from mla_portable.models import Model


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Of layers."""

    topk: int
    max_model_len: int


_CPU: Final = _Sizes(topk=64, max_model_len=256)
"""Nothing is compiled for a CPU but in tests."""


@dataclass(frozen=True, slots=True)
class Warmed:
    """Something that engines run, after it ran. served: by which implementations. error: why it could not, "" otherwise."""

    what: str
    served: str
    seconds: float
    error: str = ""


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """Where compiled kernels are kept. files: that are there now. new: that were not there before. names: of new kernels."""

    path: Path
    files: int
    new: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WarmReport:
    """What ran, and what the caches hold since."""

    facts: DeviceFacts
    ran: tuple[Warmed, ...]
    caches: tuple[CacheFolder, ...]

    @property
    def ok(self) -> bool:
        """All of it ran."""
        return not any(each.error for each in self.ran)

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def can_warm(model: Model) -> bool:
    """Its layers are those of a step: queries and rows with a rotary part, and one cache."""
    return model.head_dims[1] > 0 and not model.extra_topk


def warm(
    device: torch.device,
    *,
    registry: Registry,
    model: Model,
    heads: Collection[int],
    layouts: Collection[str],
    environ: Mapping[str, str],
    progress: Progress | None = None,
) -> WarmReport:
    """Compile what layers of a model run on `device`, by running it.

    Args:
        model: one that `can_warm`. heads: query heads of a rank. layouts: of the cache. environ: says where caches are.
    Raises: whatever an implementation raises; that none serves is an error in the report.
    """
    folders = cache_folders(registry, environ)
    before = {folder: files_in(folder) for folder in folders}
    jobs = list(_jobs(device, registry, model, heads, layouts))
    ran: list[Warmed] = []
    for number, (what, job) in enumerate(jobs):
        if progress:
            progress(what, number, len(jobs))
        begin = time.perf_counter()
        served, error = "", ""
        try:
            with accelerator(device).guard(), torch.no_grad():
                served = job()
                accelerator(device).synchronize()
        except UnsupportedRequest as refusal:  # of a route, too
            error = str(refusal)
        ran.append(Warmed(what, served, time.perf_counter() - begin, error))
    caches = [_cache(folder, before[folder], files_in(folder)) for folder in folders]
    return WarmReport(registry.facts(device), tuple(ran), tuple(caches))


def cache_folders(registry: Registry, environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Triton's, and those of plugins: what MLA_PORTABLE_<PLUGIN>_CACHE names, or a folder in the user's caches."""
    caches = Path(environ.get("XDG_CACHE_HOME", "").strip() or Path.home() / ".cache") / "mla-portable"
    named = [Path(value) for name, value in registry.environment if name.endswith("_CACHE") and value != "off"]
    triton = environ.get("TRITON_CACHE_DIR", "").strip() or Path.home() / ".triton" / "cache"
    return tuple(dict.fromkeys((Path(triton), *named, caches)))


def files_in(folder: Path) -> frozenset[Path]:
    """Every file below a folder; none where there is no folder."""
    return frozenset(path for path in folder.rglob("*") if path.is_file())


def _cache(folder: Path, before: frozenset[Path], after: frozenset[Path]) -> CacheFolder:
    new = after - before
    kernels = {path.stem for path in new if path.suffix == ".json" and not path.name.startswith("__")}  # Triton's
    return CacheFolder(folder, len(after), len(new), tuple(sorted(kernels)))


def _jobs(
    device: torch.device, registry: Registry, model: Model, heads: Collection[int], layouts: Collection[str]
) -> Iterator[tuple[str, Callable[[], str]]]:
    sizes = _CPU if device.type == "cpu" else _Sizes(model.topk, model.max_model_len)
    for layout in layouts:
        formats = LAYOUTS[layout].scale_formats or (None,)
        for count in heads:
            for scales in formats:
                name = ", ".join(filter(None, (f"layer of {count} heads", layout, scales and f"{scales} scales")))
                yield name, partial(_layer, device, registry, model, layout, count, scales, sizes)
            name = f"prompts over keys of each head, {count} heads, {layout}"
            yield name, partial(_prompts, device, registry, model, layout, count, sizes)
    yield "indexer", partial(_indexer, device, registry, model, sizes)


def _layer(
    device: torch.device, registry: Registry, model: Model, layout: str, heads: int, scales: str | None, sizes: _Sizes
) -> str:
    spec = layer_spec(model, layout, heads, topk=sizes.topk, max_model_len=sizes.max_model_len, scale_format=scales)
    layer = SparseMLAAttention(spec, device=device, registry=registry)
    warm_layer(layer)
    return served_by(layer.route_decision)


def _prompts(device: torch.device, registry: Registry, model: Model, layout: str, heads: int, sizes: _Sizes) -> str:
    spec = layer_spec(model, layout, heads, topk=sizes.topk, max_model_len=sizes.max_model_len)
    try:
        attention = PromptAttention(spec, HeadDims(*model.head_dims), device=device, registry=registry)
    except UnsupportedRequest:  # an engine then lets prompts take the route of the layer
        return "nothing: prompts take the layer's route"
    warm_prompts(attention)
    return in_words(pairs(attention.decisions.values()))


def _indexer(device: torch.device, registry: Registry, model: Model, sizes: _Sizes) -> str:
    demand, facts = LayerRegistry(registry, None), registry.facts(device)
    request, write = indexer_requests(facts, sizes.topk)
    found = [demand.resolve(each) for each in (request.but(num_heads=model.index_heads), write)]
    select, keys = found[0].call, found[1].call

    def pages(count: int) -> Tensor:
        return torch.zeros((count, 64, INDEX_FP8.row_width), dtype=INDEX_FP8.dtype, device=device)

    keys(
        torch.zeros((1, INDEX_HEAD_SIZE), dtype=torch.bfloat16, device=device),
        pages(1),
        torch.full((1,), -1, dtype=torch.int64, device=device),
    )
    warm_indexer(
        select,
        pages,
        num_heads=model.index_heads,
        topk=sizes.topk,
        longest=sizes.max_model_len,
        dtype=torch.float8_e4m3fn,
    )
    return in_words(pairs(each.decision for each in found))
