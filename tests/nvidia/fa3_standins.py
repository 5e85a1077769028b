# SPDX-License-Identifier: Apache-2.0
"""A strict CPU stand-in of FlashAttention 3's operator as vLLM's and SGLang's packages register it.

It refuses what the operator refuses, and what the kernel would only punish: a page that is no row of the cache raises instead
of reading wild memory. Pages past a row's count may be anything. On prompts it multiplies what is masked in a tile by 0, the
rows of other requests among it, as the kernel does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

HEAD = (
    "Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor(a!)? out, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, "
    "Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, "
    "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
)
SCHEMAS = {
    "vllm": (
        "_vllm_fa3_C",
        f"fwd(Tensor(b!) q, Tensor k, Tensor v, {HEAD}float softmax_scale, bool is_causal, int window_size_left, "
        "int window_size_right, float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, "
        "bool? pack_gqa, int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]",
    ),
    "sgl_kernel": (
        "sgl_kernel",
        f"fwd(Tensor q, Tensor k, Tensor v, {HEAD}float? softmax_scale, bool is_causal, int window_size_left, "
        "int window_size_right, int attention_chunk, float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, "
        "int num_splits, bool? pack_gqa, int sm_margin, Tensor? sinks, Tensor? sparse_mask_fine, bool only_qv) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
    ),
}
"""package -> its namespace in torch.ops and the operator's schema, as its library has it (vLLM 0.26, sglang-kernel 0.4.5)."""
USED = {
    "q", "k", "v", "q_v", "out", "seqused_k", "max_seqlen_k", "page_table", "softmax_scale", "num_splits", "cu_seqlens_q",
    "max_seqlen_q",
}  # fmt: skip
USED_ON_PROMPTS = {
    "q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "is_causal",
    "num_splits",
}  # fmt: skip
TILE = 128
"""Keys of a tile of prompts."""


@dataclass
class Library:
    """One build. empty: the lse of a row without pages or keys.

    calls: (rows, heads, topk, splits) of each with pages. prompts: (tokens, heads, keys, max_seqlen_q) of each on prompts.
    """

    empty: float = -math.inf
    calls: list[tuple[int, int, int, int]] = field(default_factory=list)
    prompts: list[tuple[int, int, int, int]] = field(default_factory=list)

    def need(self, fact: bool, what: str) -> None:
        if not fact:
            raise RuntimeError(f"stand-in of FlashAttention 3: {what}")

    def forward(self, given: dict[str, object]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        neutral = {
            "is_causal": (False, True),  # of one query token it means nothing
            "window_size_left": (-1,),
            "window_size_right": (-1,),
            "attention_chunk": (0,),
            "softcap": (0.0,),
            "is_rotary_interleaved": (False, True),  # of rotary embeddings that are not given
            "sm_margin": (0,),
            "cp_world_size": (1,),
            "cp_rank": (0,),
            "only_qv": (False,),
        }
        on_prompts = given["cu_seqlens_k"] is not None
        for name, value in given.items():
            if name not in (USED_ON_PROMPTS if on_prompts else USED):
                self.need(value in neutral.get(name, (None,)), f"{name} is {value}")
        if on_prompts:
            return self.on_prompts(given)
        q, k, v, q_v, pages, used = (given[name] for name in ("q", "k", "v", "q_v", "page_table", "seqused_k"))
        varlen = given["cu_seqlens_q"] is not None
        if varlen:  # a row for each query token
            self.need(given["max_seqlen_q"] == 1, "more than one token a sequence")
            self.need(given["cu_seqlens_q"].tolist() == list(range(len(q) + 1)), "cu_seqlens_q")
            q, q_v = q.unsqueeze(1), q_v.unsqueeze(1)
        out = given["out"]
        rows, one, heads, _ = q.shape
        topk = pages.shape[1]
        self.need(rows > 0 and one == 1 and tuple(q.shape[3:]) == (64,), f"q {list(q.shape)}")
        self.need(tuple(q_v.shape) == (rows, 1, heads, 512), f"q_v {list(q_v.shape)}")
        self.need(k.shape[0] > 0 and tuple(k.shape[1:]) == (1, 1, 64), f"k {list(k.shape)}")
        self.need(tuple(v.shape) == (k.shape[0], 1, 1, 512), f"v {list(v.shape)}")
        for name, tensor in (("q", q), ("q_v", q_v), ("k", k), ("v", v)):
            self.need(tensor.dtype == torch.bfloat16 and tensor.stride(-1) == 1, f"{name} {tensor.dtype} {tensor.stride()}")
            self.need(tensor.data_ptr() % 16 == 0, f"{name} starts at {tensor.data_ptr():#x}")
            moved = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1][:-1]
            self.need(all(stride % 8 == 0 for stride in moved), f"{name} has strides {tensor.stride()}")
        self.need(pages.dtype == torch.int32 and pages.dim() == 2 and len(pages) == rows and pages.stride(1) == 1, "page_table")
        self.need(used.dtype == torch.int32 and tuple(used.shape) == (rows,) and used.is_contiguous(), "seqused_k")
        self.need(bool(((used >= 0) & (used <= topk)).all()) and given["max_seqlen_k"] == topk, "seqused_k out of range")
        self.need(0 <= given["num_splits"] <= 256, f"num_splits {given['num_splits']}")
        if out is None:
            out = torch.empty((rows, 1, heads, 512), dtype=q.dtype)
            returned = out.squeeze(1) if varlen else out
        else:
            returned = out
            out = out.unsqueeze(1) if varlen else out
        self.need(out.dtype == q.dtype and tuple(out.shape) == (rows, 1, heads, 512), f"out {list(out.shape)}")
        self.need(out.stride(-1) == 1 and out.data_ptr() % 16 == 0, "out is not aligned")
        self.calls.append((rows, heads, topk, given["num_splits"]))
        lse = torch.empty(rows, heads, 1)
        for row in range(rows):
            chosen = pages[row, : int(used[row])].long()
            self.need(bool(((chosen >= 0) & (chosen < k.shape[0])).all()), "a page led to wild memory")
            if not len(chosen):
                out[row], lse[row] = 0.0, self.empty
                continue
            keys, values = k[chosen, 0, 0].float(), v[chosen, 0, 0].float()
            scores = (q[row, 0].float() @ keys.T + q_v[row, 0].float() @ values.T) * given["softmax_scale"]
            lse[row] = scores.logsumexp(dim=1, keepdim=True)
            out[row, 0] = (torch.exp(scores - lse[row]).bfloat16().float() @ values).to(out.dtype)
        return returned, lse.squeeze(2).T.contiguous() if varlen else lse, torch.empty(0), torch.empty(0)

    def on_prompts(self, given: dict[str, object]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v, out = (given[name] for name in ("q", "k", "v", "out"))
        (tokens, heads, wide), (keys, _, narrow) = q.shape, v.shape
        self.need((wide, narrow) in ((192, 128), (256, 256)), f"dims {wide}/{narrow}")
        self.need(tokens > 0 and keys > 0, f"{tokens} tokens, {keys} keys: rows of no request would be written")
        self.need(tuple(k.shape) == (keys, heads, wide), f"k {list(k.shape)}")
        self.need(out is not None and tuple(out.shape) == (tokens, heads, narrow), "out")
        for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
            self.need(tensor.dtype == torch.bfloat16 and tensor.stride(2) == 1, f"{name} {tensor.dtype} {tensor.stride()}")
            self.need(tensor.data_ptr() % 16 == 0, f"{name} starts at {tensor.data_ptr():#x}")
            moved = [stride for stride, size in zip(tensor.stride()[:2], tensor.shape[:2], strict=True) if size > 1]
            self.need(all(stride % 8 == 0 for stride in moved), f"{name} has strides {tensor.stride()}")
        starts = [given[name] for name in ("cu_seqlens_q", "cu_seqlens_k")]
        for each in starts:
            self.need(each.dtype == torch.int32 and each.dim() == 1 and each.is_contiguous(), "starts")
        self.need(len(starts[0]) == len(starts[1]) > 1, "another number of requests")
        self.need(given["num_splits"] == 1, f"num_splits {given['num_splits']}")
        longest, causal = given["max_seqlen_q"], given["is_causal"] and given["max_seqlen_q"] > 1
        rounded = -(-max(longest, given["max_seqlen_k"]) // TILE) * TILE  # in int32
        self.need(rounded < 2**31, f"a bound of {max(longest, given['max_seqlen_k'])} overflows")
        self.prompts.append((tokens, heads, keys, longest))
        lse = torch.full((heads, tokens), float("nan"))
        firsts, begins = (each.tolist() for each in starts)
        for (first, last), (begin, end) in zip(pairwise(firsts), pairwise(begins), strict=True):
            self.need(last - first <= longest and end - begin <= given["max_seqlen_k"], "a request is longer than its bound")
            reached = min(begin + -(-(end - begin) // TILE) * TILE, keys)
            scores = torch.einsum("qhd,khd->hqk", q[first:last].float(), k[begin:reached].float()) * given["softmax_scale"]
            seen = (torch.arange(reached - begin) < end - begin).expand(last - first, -1)
            if causal:
                limit = torch.arange(last - first).unsqueeze(1) + (end - begin) - (last - first)
                seen = seen & (torch.arange(reached - begin) <= limit)
            scores = scores.masked_fill(~seen, -math.inf)
            its = scores.logsumexp(dim=2)
            weights = torch.exp(scores - its.masked_fill(its.isinf(), 0.0).unsqueeze(2)).bfloat16().float()
            out[first:last] = torch.einsum("hqk,khd->qhd", weights, v[begin:reached].float()).to(out.dtype)
            lse[:, first:last] = its.masked_fill(its.isinf(), self.empty)
        return out, lse, torch.empty(0), torch.empty(0)


@contextmanager
def installed(package: str = "vllm", **differences: object) -> Iterator[Library]:
    """torch.ops.<namespace>.fwd as that package registers it, for the CPU."""
    lib, (namespace, schema) = Library(**differences), SCHEMAS[package]
    library = torch.library.Library(namespace, "FRAGMENT")
    names: list[str] = []

    def fwd(*values: object):
        results = lib.forward(dict(zip(names, values, strict=True)))
        return list(results) if package == "vllm" else results

    try:
        library.define(schema)
        library.impl("fwd", fwd, "CPU")
        operator = getattr(torch.ops, namespace).fwd.default
        names += [argument.name for argument in operator._schema.arguments]
        yield lib
    finally:
        library._destroy()
