# SPDX-License-Identifier: Apache-2.0
"""Which part of a layer a kernel belongs to, by its name; of a GEMM also by the operator that launched it.

A kernel that no pattern knows is `unknown`, so that new ones are seen: `judge.rank` fails where they take much.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from checkpoint import LATENT

LATENT_ROWS, PER_HEAD, INDEXER = "attention over latent rows", "attention over per-head keys", "indexer scores and selection"
ABSORB, GEMM, MOE = "absorb and up-projection GEMMs", "other GEMMs", "MoE"
LINEAR = "linear attention"
REST, UNKNOWN = "the rest", "unknown"
KINDS: Final = (LATENT_ROWS, PER_HEAD, INDEXER, ABSORB, GEMM, MOE, LINEAR, REST, UNKNOWN)

_NAMES: Final = tuple(
    (kind, re.compile("|".join(patterns), re.IGNORECASE))
    for kind, patterns in (
        (MOE, ("moe", "grouped_?topk", "topk_?gating", "expert")),
        # GLM-5.3-Flash: between its sparse layers, and the indexer of its pools of keys
        (LINEAR, ("kda_|flashkda|gated_delta|delta_rule|chunk_(fwd|gla|local|scaled|kda)|causal_conv1d|solve_tril",)),
        (LINEAR, ("recompute_w_u|l2norm|(gather_initial|scatter)_states|_inverse_kernel|layer_norm_gated|fused_post_conv",)),
        (INDEXER, ("kpool|fwht|expand_pools",)),
        # FlashAttention 3 over latent rows: values are 512 wide, which follows the tile's sizes
        (LATENT_ROWS, (r"FlashAttn.*C<\d+> ?>, ?512\b", "splitkv_mla", "mla_combine", "mla_metadata")),
        (LATENT_ROWS, ("sparse_(decode|prefill|attn|attention|fwd)", "merge_splits", "concat_?mla_?q", "convert_(req_)?ind")),
        (LATENT_ROWS, (r"^_(sanitise|finish|lse|page_list|spread|merge)_kernel",)),
        (PER_HEAD, ("masked_prefill", "pack_selection", "merge_(attn_)?states", "concat_mla_k")),
        (PER_HEAD, ("FlashAttn", r"\bflash::", "varlen")),
        (INDEXER, ("mqa_logits", "indexer", "index_write", "logits_(decode|prefill)", "chosen_scores")),
        (INDEXER, (r"^(decode|prefill|ragged|guess|count|compact|select)_kernel", r"^_(describe|erase|window)_kernel")),
        (INDEXER, ("top_?k", "radix", "per_token_group_quant", "chunk_metadata", "uniform_decode", "pack_seq")),
        (GEMM, ("nvjet", "gemm", "gemv", "cublas", "split_?k_?reduce", "xmma", "s16816")),
        (REST, ("at::native", "elementwise", "norm", "rotary", "rope", "act_and_mul", "silu", "cub::", "CatArray")),
        (REST, ("memcpy", "memset", "cache", "gather_upconvert", "slot_mapping", "embedding", "fill", "copy")),
        (REST, ("^triton_", "^_(prepare|compute)_", "mhc_", "hc_prenorm")),
    )
)
"""In the order in which they are tried. Rows that are gathered out of the cache may serve either attention."""

_PRODUCTS: Final = frozenset({"aten::mm", "aten::addmm", "aten::bmm"})


class Launch(NamedTuple):
    """Kernels of one name: the operator that launched them ("" where none is known), its shapes, and their time."""

    kernel: str
    operator: str
    shapes: tuple[tuple[int, ...], ...]
    us: float


def kind_of(launch: Launch) -> str:
    """Of KINDS. Batched products are those with W_UK and W_UV, and only `kv_b_proj` sums over a latent row."""
    kind = next((kind for kind, pattern in _NAMES if pattern.search(launch.kernel)), UNKNOWN)
    if kind != GEMM or launch.operator not in _PRODUCTS:
        return kind
    matrices = [shape for shape in launch.shapes if len(shape) >= 2]
    is_up = launch.operator == "aten::bmm" or (bool(matrices) and matrices[-1][0] == LATENT)
    return ABSORB if is_up else GEMM


def launches(events: Iterable[Any]) -> list[Launch]:
    """Of a profile of host and device with shapes (`torch.profiler.profile.events()`).

    A kernel's time counts once: at the operator that launched it, or without one where the profiler knows none.
    """
    from torch.autograd import DeviceType

    found: list[Launch] = []
    without: dict[str, float] = defaultdict(float)
    for event in events:
        if event.device_type == DeviceType.CUDA:
            if not event.is_user_annotation:  # a range of the host's, drawn over the kernels in it
                without[event.name] += event.time_range.elapsed_us()
            continue
        shapes = tuple(tuple(shape) for shape in event.input_shapes or () if shape)
        for kernel in event.kernels:
            found.append(Launch(kernel.name, event.name, shapes, kernel.duration))
            without[kernel.name] -= kernel.duration
    return found + [Launch(name, "", (), us) for name, us in without.items() if us > 0.01]


def by_kind(found: Iterable[Launch], layers: int) -> tuple[dict[str, float], dict[str, float]]:
    """Microseconds a layer of each kind that has any, as in KINDS; and by their names of those that are unknown."""
    kinds: dict[str, float] = defaultdict(float)
    unknown: dict[str, float] = defaultdict(float)
    for launch in found:
        kind = kind_of(launch)
        kinds[kind] += launch.us / layers
        if kind == UNKNOWN:
            unknown[launch.kernel] += launch.us / layers
    found_kinds = {kind: round(kinds[kind], 2) for kind in KINDS if kinds.get(kind, 0.0) >= 0.01}
    return found_kinds, {name: round(us, 2) for name, us in unknown.items()}
