# SPDX-License-Identifier: Apache-2.0
"""Strict CPU stand-ins of every generation of FlashMLA: their names, schemas, demands and conventions, computed with torch.

They refuse what the kernels cannot take (head counts, multiples, dtypes, strides, alignment), and what the kernels would only
punish: an index that is neither a slot nor -1 raises instead of reading wild memory, a plan that is not the kernel's own
raises instead of leaving rows undone.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mla_portable_nvidia.flashmla.discovery import forget


@dataclass
class Library:
    """One build of FlashMLA.

    base_2, empty: of the prefill's lse. empty_out: what is left in a row without keys, by heads, where not zeros;
    sunk_out: likewise, under a sink. native: head counts of the prefill beside 64 and 128. old: the layout of plans and
    the prefill's conventions of 2025. bf16: the decode of 2025 reads caches of bf16 as well, as MetaX's does.
    plans: planner launches. accumulators: most bytes a call allocated. calls: decode shapes. extra_calls: of those, with a
    second cache.
    """

    arch: str = "sm90"
    num_sms: int = 132
    base_2: bool = False
    empty: float = math.inf
    empty_out: dict[int, float] = field(default_factory=dict)
    sunk_out: float = 0.0
    native: tuple[int, ...] = ()
    prefill_heads: tuple[int, ...] = (64, 128)
    old: bool = False
    bf16: bool = False
    plans: int = 0
    accumulators: int = 0
    calls: list[tuple[int, ...]] = field(default_factory=list)
    extra_calls: int = 0
    prefill_calls: list[tuple[int, ...]] = field(default_factory=list)
    prefill_widths: set[int] = field(default_factory=set)
    sinks: int = 0
    lengths: int = 0

    def need(self, fact: bool, what: str) -> None:
        if not fact:
            raise RuntimeError(f"stand-in of FlashMLA: {what}")

    # ------------------------------------------------------------------------------------------------------ planning

    def parts(self, query_len: int, heads: int) -> int:
        tiles = heads // 64 if self.arch == "sm90" else 1
        return max(self.num_sms // query_len // tiles, 1)

    def own_plan(self, batch: int, query_len: int, heads: int, topk: int) -> tuple[Tensor, Tensor]:
        """Deal the rows out to the parts one after the other, as the planner kernel does."""
        parts, blocks, overhead = self.parts(query_len, heads), max(topk, 1) // 64 + (topk % 64 > 0), 5
        budget = math.ceil(batch * (blocks + overhead) / parts) + overhead
        row = begin = split = 0
        totals, entries = [0] * (batch + 1), []
        for _ in range(parts):
            first_row, first_block, first_split, left = row, begin, split, budget
            while row < batch and left >= blocks - begin + overhead:
                left -= blocks - begin + overhead
                totals[row + 1] = totals[row] + split + 1
                row, begin, split = row + 1, 0, 0
            if row < batch and left > overhead:
                begin, split = begin + left - overhead, split + 1
            last_row, last_block = (row, begin) if begin else (row - 1, blocks)
            starts_inside, ends_inside = first_block > 0, last_block < blocks
            if first_row == last_row:
                starts_inside = ends_inside = starts_inside or ends_inside
            if self.old:
                entries.append([first_row, first_block, last_row, last_block, first_split, 0, 0, 0])
            else:
                flags = [int(starts_inside), int(ends_inside)]
                entries.append([first_row, last_row, first_block, last_block, first_split, *flags, 0])
        return torch.tensor(entries, dtype=torch.int32), torch.tensor(totals, dtype=torch.int32)

    def plan(self, batch: int, query_len: int, heads: int, topk: int) -> tuple[Tensor, Tensor]:
        self.plans += 1
        return self.own_plan(batch, query_len, heads, topk)

    # -------------------------------------------------------------------------------------------------------- decode

    def decode(self, q, kv, indices, scale, sink=None, topk_length=None, plan=None, out=None, extra=None):
        """extra: (kv, indices) of a second cache, or None. Queries of 512 read rows of DeepSeek-V4, those of 576 V3.2's."""
        need = self.need
        need(q.dtype == torch.bfloat16 and q.dim() == 4 and q.shape[3] in (512, 576), f"q {list(q.shape)} {q.dtype}")
        batch, query_len, heads, width = q.shape
        is_v4 = width == 512
        need(not (self.old and is_v4), "q of 512")
        need(is_v4 or extra is None, "V3.2 does not support extra KV cache")
        need(batch > 0 and 0 < query_len <= 65535, f"b {batch}, s_q {query_len}")
        need(heads in (64, 128), f"h_q {heads} is neither 64 nor 128")
        need(q.stride(3) == 1 and q.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in q.stride()[:3]), "q is not aligned")
        need(topk_length is None, "topk_length is not there for this cache on sm90, or was not planned for")
        lists = [(kv, indices), *([] if extra is None else [extra])]
        is_bf16 = self.bf16 and kv.dtype == torch.bfloat16
        for cache, slots in lists:
            self.check_list(cache, slots, (batch, query_len), 576 if is_bf16 else 584 if is_v4 else 656)
        topk, extra_topk = indices.shape[-1], 0 if extra is None else extra[1].shape[-1]
        if sink is not None:
            need(sink.dtype == torch.float32 and tuple(sink.shape) == (heads,) and sink.is_contiguous(), "attn_sink")
            self.sinks += 1
        if out is not None:
            need(out.dtype == torch.bfloat16 and tuple(out.shape) == (batch, query_len, heads, 512), "out")
            need(out.is_contiguous(), "out is not contiguous")
        if plan is None:
            plan = self.plan(batch, query_len, heads, topk + extra_topk)
        else:
            for given, own in zip(plan, self.own_plan(batch, query_len, heads, topk + extra_topk), strict=True):
                need(given.dtype == torch.int32 and given.is_contiguous() and torch.equal(given, own), "a foreign plan")
        self.calls.append((batch, query_len, heads, topk))
        self.extra_calls += extra is not None
        self.accumulators = max(self.accumulators, 4 * (batch + len(plan[0])) * query_len * heads * 513)
        result = torch.full((batch, query_len, heads, 512), math.nan, dtype=torch.bfloat16) if out is None else out
        lse = torch.empty(batch, query_len, heads)
        for b in range(batch):
            for s in range(query_len):
                read = self.plain if is_bf16 else self.dequantised_v4 if is_v4 else self.dequantised
                rows = torch.cat([read(cache, slots[b, s]) for cache, slots in lists])
                there = torch.cat([slots[b, s] >= 0 for _, slots in lists])
                result[b, s], lse[b, s] = attend(q[b, s], rows, there, scale, sink, math.inf)
                if not bool(there.any()):
                    result[b, s] = self.empty_out.get(heads, 0.0) if sink is None else self.sunk_out
        return result, lse.transpose(1, 2), *plan

    def check_list(self, kv: Tensor, indices: Tensor, lead: tuple[int, int], row: int) -> None:
        """A paged cache of `row` bytes a token, and slots of it."""
        need = self.need
        is_bf16 = row == 576
        need(is_bf16 or kv.dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn), f"k_cache {kv.dtype}")
        need(kv.dim() == 4 and kv.shape[2:] == (1, row), f"k_cache {list(kv.shape)}")
        need(kv.stride(1) == row and kv.stride(3) == 1, f"k_cache strides {kv.stride()}")
        apart = 8 if is_bf16 else 16 if self.arch == "sm90" else {656: 656, 584: 576}[row]
        need(kv.data_ptr() % 16 == 0 and kv.stride(0) % apart == 0, "k_cache is not aligned")
        topk = indices.shape[-1]
        need(indices.dtype == torch.int32 and tuple(indices.shape) == (*lead, topk), "indices")
        need(indices.is_contiguous() and topk % 64 == 0 and topk > 0, f"indices of topk {topk}")
        wild = (indices != -1) & ((indices < 0) | (indices >= kv.shape[0] * kv.shape[1]))
        need(not bool(wild.any()), "an index led to wild memory")

    def plain(self, kv: Tensor, slots: Tensor) -> Tensor:
        """[K, 576] float32 of a cache of bf16; an absent row is zero."""
        page, there = kv.shape[1], slots >= 0
        at = slots.long().clamp(min=0)
        return torch.where(there[:, None], kv[at // page, at % page, 0].float(), 0.0)

    def dequantised_v4(self, kv: Tensor, slots: Tensor) -> Tensor:
        """[K, 512] float32, keys and values; absent rows are zero. Scales lie behind the rows of their page."""
        page, slots = kv.shape[1], slots.long()
        there = slots >= 0
        block, token = slots.clamp(min=0) // page, slots.clamp(min=0) % page
        pages = kv.view(torch.uint8).as_strided((kv.shape[0], page * 584), (kv.stride(0), 1))
        rows = pages[block[:, None], token[:, None] * 576 + torch.arange(576)]
        exponents = pages[block[:, None], page * 576 + token[:, None] * 8 + torch.arange(7)].float()
        latent = rows[:, :448].contiguous().view(torch.float8_e4m3fn).float()
        latent = (latent * torch.exp2(exponents - 127).repeat_interleave(64, dim=1)).bfloat16().float()
        plain = rows[:, 448:].contiguous().view(torch.bfloat16).float()
        return torch.where(there[:, None], torch.cat([latent, plain], dim=1), 0.0)

    def dequantised(self, kv: Tensor, slots: Tensor) -> Tensor:
        """[K, 576] float32 as the tensor cores see it; an absent row has no latent and the rope of some row."""
        page = kv.shape[1]
        slots = slots.long()
        there = slots >= 0
        rows = kv.view(torch.uint8)[slots.clamp(min=0) // page, slots.clamp(min=0) % page, 0]
        latent = rows[:, :512].contiguous().view(torch.float8_e4m3fn).float()
        scales = rows[:, 512:528].contiguous().view(torch.float32)
        if self.arch == "sm90":
            scales = scales.bfloat16().float()
        else:  # e8m0, towards zero
            scales = (scales.view(torch.int32) & 0x7F800000).view(torch.float32)
        latent = (latent * scales.repeat_interleave(128, dim=1)).bfloat16().float()
        rope = rows[:, 528:].contiguous().view(torch.bfloat16).float()
        return torch.cat([torch.where(there[:, None], latent, 0.0), rope], dim=1)

    # ------------------------------------------------------------------------------------------------------- prefill

    def prefill(self, q, kv, indices, scale, d_v=512, sink=None, topk_length=None, out=None):
        need = self.need
        need(q.dtype == torch.bfloat16 and q.dim() == 3 and q.shape[2] in (576, 512), f"q {list(q.shape)} {q.dtype}")
        tokens, heads, width = q.shape
        need(tokens > 0, "s_q is 0")
        need(heads in (*self.prefill_heads, *self.native), f"h_q {heads}")
        need(q.stride(2) == 1 and q.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in q.stride()[:2]), "q is not aligned")
        need(kv.dtype == torch.bfloat16 and kv.dim() == 3 and kv.shape[1:] == (1, width), f"kv {list(kv.shape)}")
        topk = indices.shape[-1]
        need(indices.dtype == torch.int32 and tuple(indices.shape) == (tokens, 1, topk), f"indices {list(indices.shape)}")
        need(indices.is_contiguous() and topk % 128 == 0 and topk > 0, f"indices of topk {topk}")
        need(d_v == 512, f"d_v {d_v}")
        if sink is not None:
            need(sink.dtype == torch.float32 and tuple(sink.shape) == (heads,) and sink.is_contiguous(), "attn_sink")
            self.sinks += 1
        if topk_length is not None:
            need(topk_length.dtype == torch.int32 and tuple(topk_length.shape) == (tokens,), "topk_length")
            need(bool(((topk_length >= 0) & (topk_length <= topk)).all()), "a topk_length out of range")
            need(topk_length.stride(0) == 1, "topk_length must have contiguous last dimension")
            self.lengths += 1
        if out is not None:
            need(out.dtype == torch.bfloat16 and tuple(out.shape) == (tokens, heads, 512) and out.is_contiguous(), "out")
        self.prefill_calls.append((tokens, heads, topk))
        self.prefill_widths.add(width)
        result = torch.full((tokens, heads, 512), math.nan, dtype=torch.bfloat16) if out is None else out
        lse = torch.empty(tokens, heads)
        if self.old and width == 512:  # nothing refuses it, and the build for 576 reads on into the next row, against zeros
            q = torch.nn.functional.pad(q, (0, 64))
            kv = torch.cat([kv, torch.nn.functional.pad(kv[1:, :, :64], (0, 0, 0, 0, 0, 1))], dim=2)
        for t in range(tokens):
            index = indices[t, 0].long()
            there = (index >= 0) & (index < kv.shape[0])
            rows = kv[index.masked_fill(~there, 0), 0].float().masked_fill(~there[:, None], 0.0)
            if topk_length is not None:  # what stands past it is still multiplied, by zero
                there &= torch.arange(topk) < topk_length[t]
            result[t], lse[t] = attend(q[t], rows, there, scale, sink, self.empty)
            if not there.any():
                result[t] = self.empty_out.get(heads, 0.0) if sink is None else self.sunk_out
        if self.base_2:
            lse = lse * math.log2(math.e)
        return [result, lse.clone(), lse]


def attend(q: Tensor, rows: Tensor, there: Tensor, scale: float, sink: Tensor | None, empty: float) -> tuple[Tensor, Tensor]:
    """out [H, 512] and natural lse [H] of one token; a key with probability zero is multiplied all the same."""
    if not there.any():
        return torch.zeros(q.shape[0], 512), torch.full((q.shape[0],), empty)
    scores = (q.float() @ rows.T * scale).masked_fill(~there, -math.inf)
    lse = scores.logsumexp(dim=1)
    out = torch.exp(scores - lse[:, None]).bfloat16().float() @ rows[:, :512]
    return (out if sink is None else out * torch.sigmoid(lse - sink)[:, None]), lse


# ------------------------------------------------------------------------------------------------- the generations' faces


def schedule_object_module(name: str, lib: Library, *, takes_out: bool = False) -> types.ModuleType:
    """Python's face since 2026: an object that the first call fills. takes_out: as in vLLM's copies."""
    fields = ["b", "s_q", "h_q", "page_block_size", "h_k", "causal", "is_fp8_kvcache", "topk"]
    fields += ["extra_page_block_size", "extra_topk"]
    fields += ["enable_batch_invariant"] if takes_out else []

    @dataclasses.dataclass
    class FlashMLASchedMeta:
        Config = dataclasses.make_dataclass("Config", fields)
        have_initialized: bool = False
        config: object = None
        tile_scheduler_metadata: Tensor | None = None
        num_splits: Tensor | None = None

    def get_mla_metadata(*args, **kwargs):
        return FlashMLASchedMeta(), None

    def with_out(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
        causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None, extra_k_cache=None, extra_indices_in_kvcache=None,
        topk_length=None, extra_topk_length=None, out=None, enable_batch_invariant=False,
    ):  # fmt: skip
        meta = tile_scheduler_metadata
        lib.need(isinstance(meta, FlashMLASchedMeta) and num_splits is None, "tile_scheduler_metadata must be its own object")
        lib.need(indices is not None and is_fp8_kvcache and not causal and head_dim_v == 512, "only sparse FP8 here")
        lib.need((extra_k_cache is None) == (extra_indices_in_kvcache is None) and extra_topk_length is None, "extra cache")
        extra = None if extra_k_cache is None else (extra_k_cache, extra_indices_in_kvcache)
        of_extra = [None, None] if extra is None else [extra_k_cache.shape[1], extra_indices_in_kvcache.shape[-1]]
        values = [*q.shape[:3], *k_cache.shape[1:3], causal, is_fp8_kvcache, indices.shape[-1], *of_extra]
        config = FlashMLASchedMeta.Config(*values, *([enable_batch_invariant] if takes_out else []))
        if not meta.have_initialized:
            meta.have_initialized, meta.config = True, config
        lib.need(meta.config == config, f"the object was made for {meta.config}, the call is {config}")
        plan = None if meta.tile_scheduler_metadata is None else (meta.tile_scheduler_metadata, meta.num_splits)
        result, lse, *plan = lib.decode(q, k_cache, indices, softmax_scale, attn_sink, topk_length, plan, out, extra)
        meta.tile_scheduler_metadata, meta.num_splits = plan
        return result, lse

    def without_out(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
        causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None, extra_k_cache=None, extra_indices_in_kvcache=None,
        topk_length=None, extra_topk_length=None,
    ):  # fmt: skip
        return with_out(
            q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale, causal,
            is_fp8_kvcache, indices, attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length,
        )  # fmt: skip

    flash_mla_with_kvcache = with_out if takes_out else without_out
    flash_mla_with_kvcache.__name__ = "flash_mla_with_kvcache"

    def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, indexer_topk=0):
        lib.need(indexer_topk == 0, "indexer_topk")
        return lib.prefill(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)

    return module_of(name, FlashMLASchedMeta, get_mla_metadata, flash_mla_with_kvcache, flash_mla_sparse_fwd)


def tensors_module(name: str, lib: Library) -> types.ModuleType:
    """Python's face in 2025: two tensors, no sink, no lengths."""

    def get_mla_metadata(
        cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q=None, is_fp8_kvcache=False, topk=None
    ):
        lib.need(cache_seqlens.dtype == torch.int32 and cache_seqlens.dim() == 1, "cache_seqlens")
        lib.need(is_fp8_kvcache or lib.bf16, "only FP8 here")
        lib.need(num_heads_k == 1 and num_heads_q in (64, 128) and topk is not None, "only sparse here")
        return lib.plan(len(cache_seqlens), num_q_tokens_per_head_k // num_heads_q, num_heads_q, topk)

    def flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale=None,
        causal=False, is_fp8_kvcache=False, indices=None,
    ):  # fmt: skip
        batch = q.shape[0]
        lib.need(block_table.dtype == torch.int32 and block_table.dim() == 2 and len(block_table) == batch, "block_table")
        lib.need(cache_seqlens.dtype == torch.int32 and tuple(cache_seqlens.shape) == (batch,), "cache_seqlens")
        lib.need(is_fp8_kvcache == (k_cache.dtype != torch.bfloat16) and (is_fp8_kvcache or lib.bf16), "only FP8 here")
        lib.need(indices is not None and not causal and head_dim_v == 512, "only sparse here")
        plan = (tile_scheduler_metadata, num_splits)
        return lib.decode(q, k_cache, indices, softmax_scale, plan=plan)[:2]

    def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512):
        return lib.prefill(q, kv, indices, sm_scale, d_v)

    return module_of(name, get_mla_metadata, flash_mla_with_kvcache, flash_mla_sparse_fwd)


def module_of(name: str, *members: object) -> types.ModuleType:
    module = types.ModuleType(name)
    for member in members:
        setattr(module, member.__name__, member)
    return module


_DECODE = (
    "sparse_decode_fwd(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor? attn_sink, "
    "Tensor? tile_scheduler_metadata, Tensor? num_splits, Tensor? extra_kv, Tensor? extra_indices, "
    "Tensor? extra_topk_length, int d_v, float sm_scale{}) -> (Tensor, Tensor, Tensor?, Tensor?)"
)
_PREFILL = "sparse_prefill_fwd(Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v{}) -> Tensor[]"
_SINK_LENGTH = ", Tensor? attn_sink, Tensor? topk_length"


@contextmanager
def operators(namespace: str, lib: Library, *, decode: str = "", prefill: str = _SINK_LENGTH) -> Iterator[None]:
    """torch.ops.<namespace>.sparse_decode_fwd and sparse_prefill_fwd, with schemas ending in `decode` and `prefill`."""

    def sparse_decode_fwd(q, kv, indices, length, sink, metadata, splits, kv2, indices2, length2, d_v, scale, *rest):
        lib.need((kv2 is None) == (indices2 is None) and length2 is None and d_v == 512, "half an extra cache or another d_v")
        lib.need((metadata is None) == (splits is None), "half a plan")
        lib.need(not (len(rest) > 1 and rest[1]), "batch invariance was not asked for")
        plan = None if metadata is None else (metadata, splits)
        extra = None if kv2 is None else (kv2, indices2)
        return lib.decode(q, kv, indices, scale, sink, length, plan, rest[0] if rest else None, extra)

    def sparse_prefill_fwd(q, kv, indices, scale, d_v, sink=None, length=None, out=None):
        return lib.prefill(q, kv, indices, scale, d_v, sink, length, out)

    library = torch.library.Library(namespace, "DEF")
    try:
        library.define(_DECODE.format(decode))
        library.impl("sparse_decode_fwd", sparse_decode_fwd, "CPU")
        library.define(_PREFILL.format(prefill))
        library.impl("sparse_prefill_fwd", sparse_prefill_fwd, "CPU")
        yield
    finally:
        library._destroy()


@contextmanager
def modules(**named: types.ModuleType) -> Iterator[None]:
    """Modules as if they were installed; `a__b` stands for `a.b`, whose package is made as well."""
    before = {}
    for key, module in named.items():
        path = key.replace("__", ".")
        parents = [path.rsplit(".", n)[0] for n in range(path.count("."), 0, -1)]
        for name, content in [*((parent, types.ModuleType(parent)) for parent in parents), (path, module)]:
            before.setdefault(name, sys.modules.get(name))
            content.__path__ = []
            content.__spec__ = types.SimpleNamespace(submodule_search_locations=[], name=name, origin=None)
            sys.modules[name] = content
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


OLD_PREFILL = {"base_2": True, "empty": -math.inf, "old": True}
GENERATIONS: dict[str, tuple[str, dict[str, object]]] = {
    # name -> (the provider's name, how the library differs)
    "flash_mla 2026": ("flash_mla", {}),
    "flash_mla with out": ("flash_mla", {}),
    "flash_mla 2025": ("flash_mla", OLD_PREFILL),
    "vllm 0.24": ("vllm", {}),
    "vllm 0.26": ("vllm", {}),
    "vllm 0.33": ("vllm", {"native": (8, 16, 32)}),
    "sgl_kernel 0.4.5": ("sgl_kernel", {"base_2": True}),
    "sgl_flash_mla": ("sgl_flash_mla", {}),
}


@contextmanager
def installed(generation: str, **differences: object) -> Iterator[Library]:
    """A generation as if its package were installed, and discovery knowing of nothing else."""
    lib = Library(**{**GENERATIONS[generation][1], **differences})
    with ExitStack() as stack:
        if generation == "flash_mla 2026":
            stack.enter_context(modules(flash_mla=schedule_object_module("flash_mla", lib)))
        elif generation == "flash_mla with out":
            stack.enter_context(modules(flash_mla=schedule_object_module("flash_mla", lib, takes_out=True)))
        elif generation == "flash_mla 2025":
            stack.enter_context(modules(flash_mla=tensors_module("flash_mla", lib)))
        else:
            out, invariant = ", Tensor(c!)? out_", "=None, bool enable_batch_invariant=False"
            namespace, decode, prefill = {
                "vllm 0.24": ("_flashmla_C", "", _SINK_LENGTH),
                "vllm 0.26": ("_flashmla_C", out, _SINK_LENGTH + out),
                "vllm 0.33": ("_flashmla_C", out + invariant, _SINK_LENGTH + out),
                "sgl_kernel 0.4.5": ("sgl_kernel", "", ", Tensor? attn_sink=None, Tensor? topk_length=None"),
                "sgl_flash_mla": ("flash_mla_legacy", "", _SINK_LENGTH),
            }[generation]
            stack.enter_context(operators(namespace, lib, decode=decode, prefill=prefill))
        forget()
        try:
            yield lib
        finally:
            forget()
