# SPDX-License-Identifier: Apache-2.0
"""What sparse_decode and sparse_prefill share: the oracle, the tolerances and the judge."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.judge.problems import exact
from mla_portable.judge.problems.compare import Finding, Symptom, Tolerance, close, cosine, limit_of
from mla_portable.layouts import KV_LORA_RANK, Cache, CacheLayout

SOFTMAX_SCALE: Final = 192**-0.5
"""That of DeepSeek-V3's 128 + 64 wide queries, which absorbed weights do not change."""
_NEAR: Final = 2e-2
"""How well a wrong lse must fit an explanation, relative."""

_OUT = Tolerance(
    1e-6,
    1e-2,
    "result and probabilities each rounded to bf16 (2^-8); FlashMLA's own tests allow 2.01/128 of each element",
    "row",
    cosine=1e-5,
)
_OUT_AMAX = Tolerance(
    1e-6,
    3e-2,
    "two more roundings: FlashMLA on SM90 rounds the scale to bf16, and the product with it; a model of that reaches 0.019",
    "row",
    cosine=2e-4,
)
_LSE = Tolerance(1e-4, 1.2e-4, "float32 sums of exact products; FlashMLA's own tests allow 8.01/65536 relative")
_LSE_AMAX = Tolerance(3e-2, 3e-3, "a scale rounded to bf16 moves a score by 2^-8 of its parts; a model of that reaches 0.011")
_OUT_LOW = Tolerance(
    1e-6,
    2.0**-3,
    "q, k, v and p each rounded to e4m3, by 2^-4; a model of that reaches 0.095 of a row, and 1 - 9e-4 in cosine",
    "row",
    cosine=2e-3,
)
_LSE_LOW = Tolerance(2.0**-3, 2.0**-5, "q and k each rounded to e4m3; a model of that reaches 0.083")
SCORE_ERROR: Final = 2.0**-22
"""By this share of its products' magnitudes, added up, a score of 576 products may be off in float32. Tensor cores add 16
products at a time, 36 times, and cut each sum to 24 bits: by up to 36 * 2^-23 of the largest partial sum, which for products of
random sign is about an eighth of their magnitudes. That is 2^-21 of these at most; cuts go both ways, and the largest error
that was seen, of two kernels, is 2^-23."""
LOW: Final = "low"
"""In the place of a storage: of implementations whose `Support.accuracy` is low, whatever they read."""
LOW_QUERIES: Final = 0.25
"""Queries of cases of that class are so much smaller, and scores have a deviation of 0.5. An error of 2^-4 of each factor moves
a score in proportion to it: of larger scores a row's cosine says which of its keys won, and nothing about the kernel."""
TOLERANCES: Final = {
    (storage, quantity): row
    for storage, out, lse in (
        ("bf16", _OUT, _LSE),
        ("pow2", _OUT, _LSE),
        ("amax", _OUT_AMAX, _LSE_AMAX),
        (LOW, _OUT_LOW, _LSE_LOW),
    )
    for quantity, row in (("out", out), ("lse", lse))
}


def attend(
    q: Tensor,
    kv: Cache,
    indices: Tensor,
    *,
    softmax_scale: float,
    lengths: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_kv_cache: Cache | None = None,
    extra_indices: Tensor | None = None,
    extra_lengths: Tensor | None = None,
    kv_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_layout: str | None = None,
) -> tuple[Tensor, Tensor]:
    """out [T, H, 512] and lse [T, H], float64, one query row at a time; kv is a workspace or a paged cache.

    A second cache adds its keys to those of the first. Queries of 512 leave the rotary part of keys out.
    kv_layout: of the rows; None for any of the core's.
    """
    own = exact.plugin_layout(kv_layout)
    width = KV_LORA_RANK if own is None else own.value_width
    queries = _scaled(q.detach().cpu().double(), q_scale)
    sink = None if attn_sink is None else attn_sink.detach().cpu().double()
    out = torch.empty((*queries.shape[:2], width), dtype=torch.float64, device="cpu")
    lse = torch.empty(queries.shape[:2], dtype=torch.float64, device="cpu")
    second = None if extra_kv_cache is None else (extra_kv_cache, extra_indices, extra_lengths)
    for token, (keys, times) in enumerate(_union(queries, (kv, indices, lengths), second, own, kv_scale)):
        out[token], lse[token] = _attend_row(queries[token], keys, times, width, softmax_scale, sink)
    return out, lse


def score_terms(
    q: Tensor,
    kv: Cache,
    indices: Tensor,
    *,
    softmax_scale: float,
    lengths: Tensor | None = None,
    extra_kv_cache: Cache | None = None,
    extra_indices: Tensor | None = None,
    extra_lengths: Tensor | None = None,
    kv_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_layout: str | None = None,
) -> Tensor:
    """[T, H] float64: the magnitudes of the products of a score added up, on average over keys by their weights.

    An error of each score by a share of its terms moves the lse by that share of this.
    """
    queries = _scaled(q.detach().cpu().double(), q_scale)
    terms = torch.zeros(queries.shape[:2], dtype=torch.float64, device="cpu")
    second = None if extra_kv_cache is None else (extra_kv_cache, extra_indices, extra_lengths)
    for token, (keys, times) in enumerate(
        _union(queries, (kv, indices, lengths), second, exact.plugin_layout(kv_layout), kv_scale)
    ):
        if len(keys):
            weights = (softmax_scale * (queries[token] @ keys.T) + times.double().log()).softmax(dim=1)  # [H, n]
            terms[token] = softmax_scale * (weights * (queries[token].abs() @ keys.abs().T)).sum(dim=1)
    return terms


def _union(
    queries: Tensor, first: tuple[Any, ...], second: tuple[Any, ...] | None, own: CacheLayout | None, kv_scale: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each query row the keys [n, width of `queries`] float64 that either list names, and how often each is named [n]."""
    width, each = queries.shape[-1], _chosen_keys(own, kv_scale, *first)
    if second is None:
        yield from ((keys[:, :width], times) for keys, times in each)
        return
    for (keys, times), (more_keys, more_times) in zip(each, _chosen_keys(own, kv_scale, *second), strict=True):
        yield torch.cat([keys, more_keys])[:, :width], torch.cat([times, more_times])


def _chosen_keys(
    own: CacheLayout | None, kv_scale: Tensor | None, kv: Cache, indices: Tensor, lengths: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each query row the keys [n, 576] float64, and how often each is named [n]."""
    cache, index = exact.on_cpu(kv), indices.cpu().long()
    limits = [index.shape[1]] * index.shape[0] if lengths is None else lengths.tolist()
    flat = isinstance(kv, Tensor) and kv.dim() == 2
    num_slots = len(cache) if flat else math.prod(exact.blocks_of(cache))
    for token, limit in enumerate(limits):
        named = index[token, : max(0, limit)]
        named, times = named[(named >= 0) & (named < num_slots)].unique(return_counts=True)
        latent, rope = exact.token_values(cache, named, own)
        yield _scaled(torch.cat([latent, rope.double()], dim=1), kv_scale), times


def _scaled(values: Tensor, scale: Tensor | None) -> Tensor:
    """float64, times a scale of one element where there is one."""
    return values if scale is None else values * scale.detach().cpu().double()


def _attend_row(
    q: Tensor, keys: Tensor, times: Tensor, width: int, softmax_scale: float, attn_sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out [H, width] and lse [H] of a query row q [H, 576] float64 over keys [n, 576], each times [n] times."""
    if keys.shape[0] == 0:
        return q.new_zeros(q.shape[0], width), q.new_full((q.shape[0],), -math.inf)
    latent = keys[:, :width]
    scores = softmax_scale * (q @ keys.T)  # [H, n]
    top = scores.max(dim=1, keepdim=True).values
    weights = times * torch.exp(scores - top)
    total = weights.sum(dim=1, keepdim=True)  # [H, 1]
    lse = (top + total.log())[:, 0]
    if attn_sink is not None:  # the sink is one more entry of the sum, with a value of zero
        total = total + torch.exp(attn_sink[:, None] - top)
    return (weights @ latent) / total, lse


# --------------------------------------------------------------------------------------------------------- the judge


def judge_state(
    table: dict[tuple[str, str], Tolerance],
    storage: str,
    got: dict[str, Tensor],
    want: dict[str, Tensor],
    *,
    rows: Tensor | None = None,
    sink: Tensor | None = None,
    remark: str = "",
    terms: Callable[[], Tensor] | None = None,
) -> Iterator[Finding]:
    """A state of attention, out [.., D] and where it is there lse [..], against the oracle's, by the tolerances of `table`.

    Args:
        rows: [n], the numbers of the rows where they are some of many. sink: [H], for what an error may come from.
        remark: to be added to each quantity.
        terms: makes `score_terms` like lse, by which an lse of large scores that cancel is judged; asked where it needs that.
    """
    out, want_out, want_lse = got["out"].cpu(), want["out"], want["lse"].double()
    if "lse" in got:
        lse = got["lse"].cpu()
        symptom = _lse_symptom(lse.double(), want_lse, rows, sink)
        limit = limit_of(table, storage, "lse")
        found = close(f"lse{remark}", lse, want_lse, limit, rows=rows, symptom=symptom)
        if found.message and terms is not None:
            least = terms() * (SCORE_ERROR / limit.rel)
            found = close(f"lse{remark}", lse, want_lse, limit, steps=least, rows=rows, symptom=symptom)
        yield found
    absent = want_lse == -math.inf
    yield _zero(f"out of rows without a valid entry{remark}", out, absent, rows)
    limit = limit_of(table, storage, "out")
    yield close(f"out{remark}", out, want_out, limit, rows=rows, symptom=_out_symptom(out.double(), want_out.double(), rows))
    if limit.cosine is not None:
        yield cosine(f"out cosine{remark}", out, want_out, limit.cosine)


findings = partial(judge_state, TOLERANCES)
"""Attention rows, out [n, H, 512] and lse [n, H]; see `judge_state`."""


def _row(where: tuple[int, ...], rows: Tensor | None) -> str:
    return f"row {where[0] if rows is None else int(rows[where[0]])}" if where else ""


def _lse_symptom(lse: Tensor, want: Tensor, rows: Tensor | None, sink: Tensor | None) -> Symptom:
    def symptom(where: tuple[int, ...]) -> tuple[str, str]:
        value, expected = float(lse[where]), float(want[where])
        if expected == -math.inf:
            return f"lse of a row without valid entries is {value:g}, expected -inf", _row(where, rows)
        if not math.isfinite(value):
            return f"lse is {value:g} where entries are valid (inputs that do not count hold NaN)", _row(where, rows)
        return f"lse is {value:.5g}, expected {expected:.5g}{_lse_hint(lse, want, sink)}", _row(where, rows)

    return symptom


def _lse_hint(lse: Tensor, want: Tensor, sink: Tensor | None) -> str:
    """What a wrong lse looks like: another base, or the sink counted in."""
    counts = want != -math.inf
    if torch.allclose(lse[counts] * math.log(2.0), want[counts], rtol=_NEAR, atol=_NEAR):
        return " (it looks like base 2)"
    if sink is not None and torch.allclose(lse[counts], torch.logaddexp(want, sink.double())[counts], rtol=_NEAR, atol=_NEAR):
        return " (it looks as if the sink were counted in)"
    return ""


def _out_symptom(out: Tensor, want: Tensor, rows: Tensor | None) -> Symptom:
    def symptom(where: tuple[int, ...]) -> tuple[str, str]:
        if not math.isfinite(out[where]):
            return "out holds NaN or inf (inputs that do not count hold NaN)", _row(where, rows)
        error, largest = float((out - want).abs().max()), float(want.abs().max())
        return f"out is off by {error:.3g} where it is up to {largest:.3g}", _row(where, rows)

    return symptom


def _zero(quantity: str, out: Tensor, absent: Tensor, rows: Tensor | None) -> Finding:
    """Every element of the absent rows is 0, of either sign."""
    wrong = absent.unsqueeze(-1) & (out != 0)  # NaN is not 0
    count = int(wrong.sum())
    if not count:
        return Finding(quantity, 0, 0)
    where = tuple(int(i) for i in wrong.nonzero()[0])
    symptom = "out of a row without valid entries is not 0"
    if not out[wrong].isfinite().all():
        symptom = "out holds NaN or inf (inputs that do not count hold NaN)"
    message = f"{quantity}: got {out[where].item()}, expected 0; {count} elements are not 0"
    return Finding(quantity, count, 0, message, symptom, _row(where, rows))
