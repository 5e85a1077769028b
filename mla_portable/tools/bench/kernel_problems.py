# SPDX-License-Identifier: Apache-2.0
"""Workshop: makes the tensors of a KernelCase on the device, and judges results by the float64 oracle on a few rows.

The oracle gets the very bytes that the kernels read, but only those that its rows name, so a cache of any size costs it the
same. What is large and random is drawn once and repeated: at other addresses, so it costs a kernel as much as fresh values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import FP8_DS_MLA, HEAD_SIZE, KV_LORA_RANK, LAYOUTS, DeviceFacts, Request, pack_fp8
from mla_portable.primitives import CACHE_WRITE, CONVERT_INDICES, GATHER_UPCONVERT, SPARSE_DECODE
from mla_portable.reference import oracle
from mla_portable.tools.bench.inputs import SOFTMAX_SCALE
from mla_portable.tools.bench.judged import attention_findings
from mla_portable.tools.bench.kernel_cases import ATTENTION, BLOCK_SIZE, KernelCase
from mla_portable.tools.conformance import tolerance
from mla_portable.tools.conformance.compare import Finding, close, same_bits

__all__ = ["Problem", "Workshop"]

_DRAWN: Final = 65_536
"""Tokens that are drawn; longer caches repeat them."""
_REQUESTS: Final = 128
"""Requests at most that convert_indices serves."""
_CONTEXT: Final = 8_192
"""Tokens of each of those requests."""
_GATHERED: Final = 4
"""Requests whose tokens gather_upconvert copies."""
_POISON: Final = 0xFF
"""A byte that is NaN in e4m3, and twice NaN in bfloat16: what was not written must not look right."""
_JUDGED_TOKENS: Final = 64
"""Rows of a copying primitive that the oracle judges; they cost it little."""


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """A case with its tensors.

    Attributes:
        request: what is asked of the registry.
        arguments: of the primitive, by name; results included. positional: how many of them are positional, in order.
        targets: results, to be poisoned before a run that is judged.
        bytes_moved: that any implementation must read or write at least, each cached token that is named counted once.
        flops: multiplications and additions of the two matrix products, for the heads that there are; 0 for copies.
        check: judges what the primitive returned (cache_write: the cache).
    """

    case: KernelCase
    request: Request
    arguments: Mapping[str, Any]
    positional: int
    targets: tuple[Tensor, ...]
    bytes_moved: int
    flops: int
    check: Callable[[Any], Iterator[Finding]]

    def call(self, bound: Callable[..., Any], **others: Any) -> Any:
        """Run a bound implementation. Returns: what `check` judges."""
        names = list(self.arguments)
        args = [self.arguments[name] for name in names[: self.positional]]
        kwargs = {name: self.arguments[name] for name in names[self.positional :]}
        result = bound(*args, **kwargs, **others)
        return self.arguments["kv_cache"] if self.case.primitive is CACHE_WRITE else result

    def poison(self) -> None:
        """Overwrite the results, so that nothing of an earlier run can pass for this one's."""
        for target in self.targets:
            target.view(torch.uint8).fill_(_POISON)


class Workshop:
    """Makes problems for one device; keeps one cache per layout and scales, as large as was needed so far."""

    def __init__(self, device: torch.device, facts: DeviceFacts, *, seed: int = 0, check_rows: int = 4) -> None:
        """check_rows: attention rows that the oracle judges, at most."""
        self._device, self._facts, self._check_rows = device, facts, check_rows
        self._generator = torch.Generator(device).manual_seed(seed)
        self._caches: dict[tuple[str, str], Tensor] = {}

    def make(self, case: KernelCase) -> Problem:
        """The tensors of a case."""
        if case.primitive in ATTENTION:
            return self._attention(case)
        if case.primitive is CONVERT_INDICES:
            return self._convert(case)
        return self._gather(case) if case.primitive is GATHER_UPCONVERT else self._write(case)

    # ------------------------------------------------------------------------------------------------------- material

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self._device, dtype=torch.bfloat16)

    def _scores(self, rows: int, columns: int) -> Tensor:
        return torch.rand((rows, columns), generator=self._generator, device=self._device)

    def _permutation(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator, device=self._device)

    def _empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _cache(self, case: KernelCase, tokens: int) -> Tensor:
        """[blocks, 64, row] holding at least `tokens` tokens of unit variance."""
        blocks = -(-tokens // BLOCK_SIZE)
        layout = case.kv_layout or "bf16"
        key = layout, case.storage
        kept = self._caches.get(key)
        if kept is None or kept.shape[0] < blocks:
            self._caches.pop(key, None)
            drawn = self._normal(min(blocks * BLOCK_SIZE, _DRAWN), HEAD_SIZE)
            if layout != "bf16":
                drawn = pack_fp8(drawn[:, :KV_LORA_RANK], drawn[:, KV_LORA_RANK:], scale_format=case.scale_format)
            times = -(-blocks * BLOCK_SIZE // drawn.shape[0])
            rows = drawn.repeat(times, 1)[: blocks * BLOCK_SIZE]
            kept = self._caches[key] = rows.view(blocks, BLOCK_SIZE, rows.shape[1])
        return kept[:blocks]

    def _request(self, case: KernelCase, **others: Any) -> Request:
        return Request(
            case.primitive,
            self._facts,
            kv_layout=case.kv_layout,
            num_heads=case.num_heads,
            topk=case.topk,
            rows=case.rows,
            scale_format=case.scale_format if case.kv_layout == FP8_DS_MLA.name else None,
            graph=self._device.type != "cpu",
            **others,
        )

    # ------------------------------------------------------------------------------------------------------ attention

    def _attention(self, case: KernelCase) -> Problem:
        decode, layout = case.primitive is SPARSE_DECODE, LAYOUTS[case.kv_layout or "bf16"]
        rows, heads, topk = case.rows, case.num_heads or 1, case.topk or 1
        kv = self._cache(case, case.width)
        flat = kv.flatten(0, 1)
        indices = (self._decode_indices if decode else self._prefill_indices)(case)  # [rows, K] int32
        q = self._normal(rows, heads, HEAD_SIZE)
        out = self._empty(rows, heads, KV_LORA_RANK, dtype=torch.bfloat16)
        lse = self._empty(rows, heads, dtype=torch.float32)
        paged = decode or layout.is_quantized
        arguments: dict[str, Any] = {
            "q": q.unsqueeze(1) if decode else q,
            "kv_cache" if decode else "kv": kv if paged else flat,
            "indices": indices.unsqueeze(1) if decode else indices,
            "softmax_scale": SOFTMAX_SCALE,
            "out": out.unsqueeze(1) if decode else out,
            "lse_out": lse.unsqueeze(1) if decode else lse,
        }
        request = self._request(
            case,
            block_size=BLOCK_SIZE if paged else None,
            query_len=1 if decode else None,
            lse=True,
        )
        judged = _spread(rows, self._check_rows, self._device)

        @cache
        def wanted() -> tuple[Tensor, Tensor]:
            """out [n, H, 512] and lse [n, H], float64."""
            named = flat[indices[judged].long().flatten()].cpu()  # [n * K, row]
            own = torch.arange(named.shape[0]).view(-1, topk)
            return oracle.sparse_prefill(
                q[judged].cpu(), named.unsqueeze(1) if paged else named, own, softmax_scale=SOFTMAX_SCALE
            )

        def check(result: tuple[Tensor, Tensor | None]) -> Iterator[Finding]:
            got_out = result[0].reshape(rows, heads, KV_LORA_RANK)[judged].cpu()
            got_lse = None if result[1] is None else result[1].reshape(rows, heads)[judged].cpu()
            yield from attention_findings(case.primitive, case.storage, got_out, got_lse, *wanted())

        named_tokens = int(indices.unique().numel())
        moved = named_tokens * layout.row_bytes + q.nbytes + out.nbytes + lse.nbytes + indices.nbytes
        flops = 2 * rows * heads * topk * (HEAD_SIZE + KV_LORA_RANK)
        return Problem(case, request, arguments, 3, (out, lse), moved, flops, check)

    def _decode_indices(self, case: KernelCase) -> Tensor:
        """[B, K] int32, distinct in a row: each from a context of its own where the cache has room, else from all of it."""
        topk = case.topk or 1
        context = case.width // case.rows
        own = context >= topk
        chosen = self._scores(case.rows, context if own else case.width).topk(topk, dim=1).indices
        if own:
            chosen += context * torch.arange(case.rows, device=self._device).unsqueeze(1)
        return chosen.to(torch.int32)

    def _prefill_indices(self, case: KernelCase) -> Tensor:
        """[T, K] int32: windows of one permutation of the rows, each moved on by what is not shared, in random order."""
        topk = case.topk or 1
        step = topk * (100 - case.overlap) // 100
        starts = step * torch.arange(case.rows, device=self._device).unsqueeze(1)
        window = self._permutation(case.width)[(starts + torch.arange(topk, device=self._device)) % case.width]
        order = self._scores(case.rows, topk).argsort(dim=1)
        return window.gather(1, order).to(torch.int32)

    # ---------------------------------------------------------------------------------------------------- what copies

    def _convert(self, case: KernelCase) -> Problem:
        tokens, topk = case.rows, case.topk or 1
        requests, columns = min(tokens, _REQUESTS), _CONTEXT // BLOCK_SIZE
        table = self._permutation(requests * columns).view(requests, columns).to(torch.int32)
        owner = (torch.arange(tokens, device=self._device) * requests // tokens).to(torch.int32)
        positions = (self._scores(tokens, topk) * _CONTEXT).to(torch.int32)
        out = (self._empty(tokens, topk, dtype=torch.int32), self._empty(tokens, dtype=torch.int32))
        places: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_slots": requests * _CONTEXT}
        arguments = {"topk_indices": positions, "req_id_per_token": owner, "block_table": table, **places, "out": out}
        judged = _spread(tokens, _JUDGED_TOKENS, self._device)

        def check(result: tuple[Tensor, Tensor]) -> Iterator[Finding]:
            want = oracle.convert_indices(positions[judged], owner[judged], table, **places)
            yield same_bits("indices", result[0][judged].cpu(), want[0])
            yield same_bits("counts", result[1][judged].cpu(), want[1])

        moved = sum(each.nbytes for each in (positions, owner, table, *out))
        return Problem(case, self._request(case, block_size=BLOCK_SIZE), arguments, 3, out, moved, 0, check)

    def _gather(self, case: KernelCase) -> Problem:
        layout = LAYOUTS[case.kv_layout or "bf16"]
        requests = min(case.rows, _GATHERED)
        length = -(-case.rows // requests)
        columns = -(-length // BLOCK_SIZE)
        cached = self._cache(case, requests * columns * BLOCK_SIZE)
        table = self._permutation(requests * columns).view(requests, columns).to(torch.int32)
        starts = torch.arange(requests, device=self._device, dtype=torch.int32) * length
        lens = (case.rows - starts).clamp(0, length)
        out = self._empty(case.rows, HEAD_SIZE, dtype=torch.bfloat16)
        judged = _spread(case.rows, _JUDGED_TOKENS, self._device)

        def check(result: Tensor) -> Iterator[Finding]:
            owner, position = judged // length, judged % length
            slots = table[owner, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE
            count = judged.shape[0]
            own = torch.arange(count, dtype=torch.int32).view(1, -1)
            blank = torch.zeros(count, HEAD_SIZE, dtype=torch.bfloat16)
            each = cached.flatten(0, 1)[slots].unsqueeze(1)  # [n, 1, row], blocks of one token
            want = oracle.gather_upconvert(each, own, torch.tensor([count]), torch.tensor([0]), out=blank)
            got = result[judged].cpu()
            limit = tolerance(case.primitive, case.storage, "latent")
            latent, want_latent = got[:, :KV_LORA_RANK], want[:, :KV_LORA_RANK]
            exact = limit.exact
            yield same_bits("latent", latent, want_latent) if exact else close("latent", latent, want_latent.double(), limit)
            yield same_bits("rope", got[:, KV_LORA_RANK:], want[:, KV_LORA_RANK:])

        arguments = {"kv_cache": cached, "block_table": table, "seq_lens": lens, "workspace_starts": starts, "out": out}
        request = self._request(case, block_size=BLOCK_SIZE)
        moved = case.rows * layout.row_bytes + sum(each.nbytes for each in (out, table, lens, starts))
        return Problem(case, request, arguments, 4, (out,), moved, 0, check)

    def _write(self, case: KernelCase) -> Problem:
        layout, tokens = LAYOUTS[case.kv_layout or "bf16"], case.rows
        blocks = -(-tokens // BLOCK_SIZE)
        cached = self._empty(blocks, BLOCK_SIZE, layout.row_width, dtype=layout.dtype)
        kv_c, k_pe = self._normal(tokens, KV_LORA_RANK), self._normal(tokens, HEAD_SIZE - KV_LORA_RANK)
        slots = self._permutation(blocks * BLOCK_SIZE)[:tokens]
        judged = _spread(tokens, _JUDGED_TOKENS, self._device)

        def check(result: Tensor) -> Iterator[Finding]:
            count = judged.shape[0]
            blank = torch.zeros(count, 1, layout.row_width, dtype=layout.dtype)
            want = oracle.cache_write(kv_c[judged], k_pe[judged], blank, torch.arange(count), scale_format=case.scale_format)
            yield same_bits("bytes", result.flatten(0, 1)[slots[judged]].cpu(), want[:, 0])

        arguments = {"kv_c": kv_c, "k_pe": k_pe, "kv_cache": cached, "slot_mapping": slots, "scale_format": case.scale_format}
        request = self._request(case, block_size=BLOCK_SIZE)
        moved = sum(each.nbytes for each in (kv_c, k_pe, slots)) + tokens * layout.row_bytes
        return Problem(case, request, arguments, 4, (cached,), moved, 0, check)


def _spread(count: int, at_most: int, device: torch.device) -> Tensor:
    """[n] int64: up to `at_most` of `count` rows, evenly spread, the first and the last among them."""
    return torch.linspace(0, count - 1, min(count, at_most)).round().long().unique().to(device)
