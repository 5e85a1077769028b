# SPDX-License-Identifier: Apache-2.0
"""What dispatch costs on the host: the same do-nothing kernel called directly, bound, by the convenience call, by a layer.

A private registry with a backend that does nothing isolates what this library adds; no kernel runs, so a GPU changes only
what reading a tensor's properties costs. Numbers are medians over batches of calls, in nanoseconds of one call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from mla_portable.attention import AttentionSpec, SparseMLAAttention
from mla_portable.contracts import (
    Batch,
    DeviceFacts,
    Implementation,
    InvalidArgument,
    Primitive,
    Registrar,
    Request,
    Support,
    hookimpl,
)
from mla_portable.dispatch import serving
from mla_portable.layouts import FP8_DS_MLA, HEAD_SIZE, KV_LORA_RANK, LAYOUTS
from mla_portable.planner import Planner
from mla_portable.primitives import SPARSE_DECODE, sparse_decode
from mla_portable.registry import Registry
from mla_portable.tools.bench.timing import quantiles

_NAME: Final = "idle.kernels"
_ROWS: Final = 32
_HEADS: Final = 16
_TOPK: Final = 2048
_BLOCK: Final = 64
_SCALE: Final = 0.1


@dataclass(frozen=True, slots=True)
class DispatchRow:
    """The cost of one way to call, in nanoseconds of one call.

    Attributes:
        median_ns, p10_ns, p90_ns: over batches. over: the way it is compared with, None for the first; over_ns: what it adds
            to that, median less median.
    """

    call: str
    median_ns: float
    p10_ns: float
    p90_ns: float
    over: str | None
    over_ns: float | None
    batches: int
    calls: int


class _Idle:
    """The plugin, whose attention returns at once."""

    def __init__(self) -> None:
        self.result = torch.empty(0), torch.empty(0)

    def launch(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Where a kernel would be launched."""
        return self.result

    def bind(self, request: Request) -> Callable[..., Any]:
        """As vendors' adapters do: a closure that hands the arguments to the launcher with what was fixed when binding."""
        launch, config = self.launch, request.topk

        def call(q: Tensor, kv: Tensor, indices: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
            return launch(q, kv, indices, config=config, **options)

        return call

    @hookimpl
    def mla_portable_register(self, registrar: Registrar) -> None:
        """Offer every primitive."""
        support = Support(source="does nothing", device_types=None, kv_layouts=tuple(LAYOUTS))
        for primitive in Primitive.all():
            registrar.add(Implementation(name=_NAME, primitive=primitive, support=support, bind=self.bind))


def measure_dispatch(device: torch.device | str = "cpu", *, batches: int = 201, calls: int = 100) -> tuple[DispatchRow, ...]:
    """Time the ways to reach sparse_decode, with 32 rows, 16 heads and topk 2048 on an FP8 cache of two blocks.

    Args:
        device: of the tensors. batches: samples, their median counts. calls: in a batch.
    Returns: rows "launcher", "bound", "convenience", "convenience, outputs given", "layer forward" (all of its primitives).
    Raises: InvalidArgument for counts below 1.
    """
    for name, value in (("batches", batches), ("calls", calls)):
        if value < 1:
            raise InvalidArgument("measure_dispatch", name, got=value, expected="at least 1")
    device = torch.empty(0, device=device).device
    idle = _Idle()
    facts = DeviceFacts(vendor="idle", name="a device that is not used", arch="idle", device_type=device.type)
    registry = Registry(plugins=[("idle", idle)], facts={device.type: facts}, environ={}, probe=False)
    sizes: dict[str, Any] = {"num_heads": _HEADS, "topk": _TOPK, "block_size": _BLOCK}
    bound = registry.bind(Request(SPARSE_DECODE, facts, kv_layout="fp8_ds_mla", query_len=1, **sizes))
    q = torch.zeros((_ROWS, 1, _HEADS, HEAD_SIZE), dtype=torch.bfloat16, device=device)
    cache = torch.zeros((2, _BLOCK, FP8_DS_MLA.row_width), dtype=torch.uint8, device=device)
    indices = torch.zeros((_ROWS, 1, _TOPK), dtype=torch.int32, device=device)
    out = torch.zeros((_ROWS, 1, _HEADS, KV_LORA_RANK), dtype=torch.bfloat16, device=device)
    lse = torch.zeros((_ROWS, 1, _HEADS), dtype=torch.float32, device=device)
    limits: dict[str, Any] = {"max_num_tokens": _ROWS, "max_num_reqs": _ROWS, "max_model_len": _BLOCK}
    spec = AttentionSpec(softmax_scale=_SCALE, concat_query=False, route="direct", **sizes, **limits)
    layer = SparseMLAAttention(spec, device=device, registry=registry)
    decodes = np.arange(_ROWS + 1, dtype=np.int32), np.ones(_ROWS, dtype=np.int32)
    plan = Planner(layer.planner_config()).plan(Batch(*decodes, torch.zeros((_ROWS, 1), dtype=torch.int32, device=device)))
    flat_q, topk, flat_out, flat_lse = q[:, 0], indices[:, 0], out[:, 0], lse[:, 0]
    launcher = idle.launch
    ways: dict[str, tuple[str | None, Callable[[], object]]] = {
        "launcher": (None, lambda: launcher(q, cache, indices, softmax_scale=_SCALE, out=out, lse_out=lse, config=_TOPK)),
        "bound": ("launcher", lambda: bound(q, cache, indices, softmax_scale=_SCALE, out=out, lse_out=lse)),
        "convenience": ("bound", lambda: sparse_decode(q, cache, indices, softmax_scale=_SCALE)),
        "convenience, outputs given": (
            "bound",
            lambda: sparse_decode(q, cache, indices, softmax_scale=_SCALE, out=out, lse_out=lse),
        ),
        "layer forward": ("bound", lambda: layer.forward(flat_q, cache, topk, plan, out=flat_out, lse_out=flat_lse)),
    }
    with serving(registry):
        samples = _sample([call for _, call in ways.values()], batches, calls)
    figures = {name: quantiles(times) for name, times in zip(ways, samples, strict=True)}
    return tuple(
        DispatchRow(name, *figures[name], over, None if over is None else figures[name][0] - figures[over][0], batches, calls)
        for name, (over, _) in ways.items()
    )


def _sample(ways: list[Callable[[], object]], batches: int, calls: int) -> list[list[float]]:
    """Nanoseconds per call of each way and batch. The ways take turns, so that a busy moment strikes all of them."""
    samples: list[list[float]] = [[] for _ in ways]
    for way in ways:
        way()
    for _ in range(batches):
        for way, times in zip(ways, samples, strict=True):
            start = time.perf_counter_ns()
            for _ in range(calls):
                way()
            times.append((time.perf_counter_ns() - start) / calls)
    return samples
