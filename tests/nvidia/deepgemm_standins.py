# SPDX-License-Identifier: Apache-2.0
"""Strict CPU stand-ins of DeepGEMM's scores, by build: names, signatures, demands and what is left open, computed with torch.

They refuse what DeepGEMM asserts (shapes, strides, dtypes, architectures) and what it would only punish: an address that a
descriptor cannot take, a length or a table entry that leads to wild memory, a range that wraps around, a schedule of other
lengths. What DeepGEMM does not clean is filled with large numbers, and with NaN where it writes nothing.
"""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from flashmla_standins import modules
from torch import Tensor

from mla_portable_common.deep_gemm.discovery import forget_deepgemm

E4M3 = torch.float8_e4m3fn
ANYTHING = 1e30
"""What stands in a tail: larger than any score."""


@dataclass
class Build:
    """One build of DeepGEMM. paged_rows: (B, S) of its calls. ragged_rows: T of them. logits: most bytes of a result."""

    arch: str = "sm90"
    num_sms: int = 132
    relative: bool = False
    paged_rows: list[tuple[int, int]] = field(default_factory=list)
    ragged_rows: list[int] = field(default_factory=list)
    logits: int = 0
    plans: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def need(self, fact: bool, what: str) -> None:
        if not fact:
            raise RuntimeError(f"stand-in of DeepGEMM: {what}")

    def result(self, rows: int, width: int, stride: int, aligned_rows: int) -> Tensor:
        self.logits = max(self.logits, 4 * aligned_rows * stride)
        return torch.full((aligned_rows, stride), math.nan)[:rows, :width]

    def queries(self, q: Tensor, rank: int, weights: Tensor) -> None:
        need, heads = self.need, q.shape[-2]
        need(q.dim() == rank and q.shape[-1] == 128 and q.dtype == E4M3 and q.is_contiguous(), f"q {list(q.shape)} {q.dtype}")
        need(heads in ((32, 64) if self.arch == "sm90" else (8, 16, 32, 64)), f"num_heads {heads}")
        need(weights.dtype == torch.float32 and weights.is_contiguous(), "weights")
        need(tuple(weights.shape) == (q.shape[:-2].numel(), heads), f"weights {list(weights.shape)}")
        need(weights.numel() > 0, "an empty batch")
        need(q.data_ptr() % 16 == 0 and weights.data_ptr() % 16 == 0, "an address that is no multiple of 16")

    # --------------------------------------------------------------------------------------------------------- paged

    def schedule(self, lens: Tensor, block_kv: int, num_sms: int) -> Tensor:
        self.need(lens.dim() == 2 and lens.dtype == torch.int32 and lens.is_contiguous(), "context_lens")
        self.need(block_kv == 64 or (self.arch == "sm100" and block_kv == 32), f"block_kv {block_kv}")
        plan = torch.randint(0, 99, (num_sms + 1, 2), dtype=torch.int32)
        self.plans.append((plan, lens.clone()))
        return plan

    def paged(self, q: Tensor, pages: Tensor, weights: Tensor, lens: Tensor, table: Tensor, plan: Tensor, width: int) -> Tensor:
        need = self.need
        self.queries(q, 4, weights)
        rows, next_n = q.shape[:2]
        need(next_n in (1, 2) or self.arch == "sm100", f"next_n {next_n}")
        need(pages.dim() == 4 and pages.dtype == torch.uint8 and tuple(pages.shape[2:]) == (1, 132), f"pages {pages.shape}")
        need(pages.shape[1] == 64 and pages.stride(1) == 132 and pages.stride(3) == 1, f"pages {pages.stride()}")
        need(pages.data_ptr() % 16 == 0 and pages.stride(0) % 16 == 0 and pages.stride(0) >= 8448, "blocks of the cache")
        need(lens.dtype == torch.int32 and lens.is_contiguous() and tuple(lens.shape) == (rows, next_n), "context_lens")
        need(bool((lens > 0).all()) and bool((lens <= width).all()), "a length is no length of a row")
        need(table.dtype == torch.int32 and table.dim() == 2 and len(table) == rows and table.stride(1) == 1, "block_table")
        need(tuple(plan.shape) == (self.num_sms + 1, 2), "schedule_meta")
        # of the numbers alone: they may have been copied to where a graph reads them
        known = [made for each, made in self.plans if torch.equal(each, plan)]
        need(any(torch.equal(made, lens) for made in known), "a schedule of other lengths")
        self.paged_rows.append((rows, next_n))
        logits = self.result(rows * next_n, width, -(-width // 256) * 256, rows * next_n)
        for row in range(rows):
            length = int(lens[row, -1])
            blocks = table[row, : -(-length // 64)].long()
            need(len(blocks) == -(-length // 64), "read past the block table")
            need(bool(((blocks >= 0) & (blocks < len(pages))).all()), "an entry led to wild memory")
            flat = pages[blocks, :, 0].flatten(1)
            keys = flat[:, : 64 * 128].contiguous().view(E4M3).float().view(-1, 128)
            scales = flat[:, 64 * 128 :].contiguous().view(torch.float32).flatten()
            for i in range(next_n):
                token = row * next_n + i
                logits[token, : min(width, -(-length // 256) * 256)] = ANYTHING
                logits[token, :length] = score(q[row, i], weights[token], keys, scales)[:length]
        return logits

    # -------------------------------------------------------------------------------------------------------- ragged

    def ragged(self, q, kv, weights, starts, ends) -> Tensor:
        need, (keys, scales) = self.need, kv
        self.queries(q, 3, weights)
        need(keys.dtype == E4M3 and keys.dim() == 2 and keys.is_contiguous() and keys.shape[1] == 128, "kv")
        need(scales.dtype == torch.float32 and tuple(scales.shape) == keys.shape[:1] and scales.is_contiguous(), "kv_sf")
        need(len(keys) > 0 and keys.data_ptr() % 16 == 0 and scales.data_ptr() % 16 == 0, "keys that no descriptor takes")
        for each in (starts, ends):
            need(each.dtype == torch.int32 and each.is_contiguous() and len(each) == len(q), "cu_seq_len_k")
        need(bool(((starts >= 0) & (starts <= ends) & (ends <= len(keys))).all()), "a range that wraps around")
        self.ragged_rows.append(len(q))
        block_q = 128 // q.shape[1]
        stride = -(-len(keys) // 256) * 256 if self.relative else -(-(len(keys) + 256) // 256) * 256
        logits = self.result(len(q), len(keys), stride, -(-len(q) // block_q) * block_q)
        for t in range(len(q)):
            start, end = int(starts[t]), int(ends[t])
            found = score(q[t], weights[t], keys, scales)
            if self.relative:
                logits[t, : end - start] = found[start:end]
            else:
                logits[t, start // 4 * 4 : -(-end // 256) * 256] = ANYTHING
                logits[t, start:end] = found[start:end]
        return logits


def score(q: Tensor, weights: Tensor, keys: Tensor, scales: Tensor) -> Tensor:
    """[n] of q [H, 128], weights [H], keys [n, 128] and scales [n]. As `fmaxf` does, the ReLU makes 0 of NaN."""
    dots = (q.float() @ keys.float().T).clamp(min=0).nan_to_num(nan=0.0)
    return (dots * weights[:, None]).sum(dim=0) * scales


class Bound:
    """What pybind11 makes of a function: a docstring, no signature."""

    def __init__(self, name: str, parameters: str, function: Callable[..., object]) -> None:
        self.__name__, self.__doc__ = name, f"{name}({parameters}) -> torch.Tensor\n"
        self._function = function

    @property
    def __signature__(self) -> inspect.Signature:
        raise ValueError(f"no signature found for builtin {self.__name__}")

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._function(*args, **kwargs)


_KV = "kv: tuple[torch.Tensor, torch.Tensor], weights: torch.Tensor, cu_seq_len_k_start: torch.Tensor, "
_RAGGED = _KV + "cu_seq_len_k_end: torch.Tensor, clean_logits: bool = True, max_seqlen_k: typing.SupportsInt = 0"
_PAGED = (
    "kv_cache: torch.Tensor, weights: torch.Tensor, context_lens: torch.Tensor, block_table: torch.Tensor, "
    "schedule_meta: torch.Tensor, max_context_len: typing.SupportsInt, clean_logits: bool = False"
)
_Q = "q: tuple[torch.Tensor, torch.Tensor | None], "
_DTYPE = ", logits_dtype: torch.dtype = torch.float32"


def bound_module(name: str, build: Build) -> types.ModuleType:
    """A pybind11 build."""

    def values(q: object) -> Tensor:
        build.need(isinstance(q, tuple) and q[1] is None, "q")
        return q[0]

    def ragged(q, kv, weights, starts, ends, clean_logits=True, max_seqlen_k=0):
        build.need(not clean_logits and max_seqlen_k == 0, "clean_logits or max_seqlen_k")
        return build.ragged(values(q), kv, weights, starts, ends)

    def paged(q, pages, weights, lens, table, plan, width, clean_logits=False):
        build.need(not clean_logits, "clean_logits with lengths of two dimensions")
        return build.paged(values(q), pages, weights, lens, table, plan, width)

    module = types.ModuleType(name)
    for label, parameters, function in (
        ("fp8_fp4_mqa_logits", _RAGGED, ragged),
        ("fp8_fp4_paged_mqa_logits", _PAGED, paged),
    ):
        setattr(module, label, Bound(label, _Q + parameters + _DTYPE, function))
    module.get_paged_mqa_logits_metadata = build.schedule
    module.get_num_sms = lambda: build.num_sms
    return module


def python_module(name: str, build: Build) -> types.ModuleType:
    """vLLM 0.33's: functions of Python's, scores of gathered keys from a row's first key on."""

    def fp8_fp4_mqa_logits(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, max_seqlen_k, schedule_meta=None):
        build.need(q[1] is None and max_seqlen_k == len(kv[0]) and schedule_meta is None, "q, max_seqlen_k or schedule_meta")
        return build.ragged(q[0], kv, weights, cu_seq_len_k_start, cu_seq_len_k_end)

    def fp8_fp4_paged_mqa_logits(q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, indices=None):
        build.need(q[1] is None and indices is None, "q or indices")
        return build.paged(q[0], kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len)

    build.relative = True
    module = types.ModuleType(name)
    module.fp8_fp4_mqa_logits, module.fp8_fp4_paged_mqa_logits = fp8_fp4_mqa_logits, fp8_fp4_paged_mqa_logits
    module.get_paged_mqa_logits_metadata = build.schedule
    module.get_num_sms = lambda: build.num_sms
    return module


BUILDS = ("deep_gemm 2026", "vllm 0.26", "vllm 0.33")


@contextmanager
def installed(name: str, **differences: object) -> Iterator[Build]:
    """A build as if its package were installed, and nothing known about DeepGEMM."""
    build = Build(**differences)
    path = "vllm.third_party.deep_gemm" if name.startswith("vllm") else "deep_gemm"
    if name == "vllm 0.33":
        module = python_module(path, build)
    else:
        module = bound_module(path, build)
    with modules(**{path.replace(".", "__"): module}):
        forget_deepgemm()
        try:
            yield build
        finally:
            forget_deepgemm()
