# SPDX-License-Identifier: Apache-2.0
"""masked_prefill: attention of prompts over keys and values of each head, causal or not, under a selection of keys or not."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from mla_portable.contracts import Primitive
from mla_portable.contracts.values import INT32_MAX, check_count, check_flag, check_scale, refuse, rounded_rows
from mla_portable.dispatch import find, opaque
from mla_portable.kit.results import head_results
from mla_portable.kit.rules import shape_of
from mla_portable.kit.tensor_table import Axes, TensorTable
from mla_portable.primitives._reference import isolated, products

__all__ = ["MASKED_PREFILL", "MaskedPrefill", "masked_prefill"]

_CHUNK_BYTES: Final = 64 << 20
"""Of the scores of one head and their temporaries that are held at a time."""

TENSORS: Final = TensorTable(
    "masked_prefill",
    {
        "q": Axes("T H Dqk", torch.bfloat16, not_empty="H Dqk"),
        "k": Axes("N H Dqk", torch.bfloat16),
        "v": Axes("N H Dv", torch.bfloat16, not_empty="Dv"),
        "query_start_loc": Axes("R+1", torch.int32),
        "key_start_loc": Axes("R+1", torch.int32),
        "selection": Axes("T W", torch.int32, optional=True, not_empty="W"),
        "out": Axes("T H Dv", torch.bfloat16, optional=True, written=True),
        "lse_out": Axes("T H", torch.float32, optional=True, written=True),
    },
    given="R",
)


class MaskedPrefill(Protocol):
    """Attention of prompts over keys and values of each head.

    q [T, H, Dqk], k [N, H, Dqk], v [N, H, Dv] bf16, with any strides but those of the last dimension; query_start_loc and
    key_start_loc [R + 1] int32; selection [T, W] int32, as `pack_selection` makes it. Returns out [T, H, Dv] bf16 and lse
    [T, H] float32, which are `out` and `lse_out` where given. Graph-safe with them.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_start_loc: Tensor,
        key_start_loc: Tensor,
        *,
        softmax_scale: float,
        max_query_len: int,
        max_key_len: int,
        causal: bool = True,
        selection: Tensor | None = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...


@opaque
def masked_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    *,
    softmax_scale: float,
    max_query_len: int,
    max_key_len: int,
    causal: bool = True,
    selection: Tensor | None = None,
    out: Tensor | None = None,
    lse_out: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of prompts over keys and values of each head.

    A query sees the keys of its own request: all of them, or where `causal` query i of Lq sees keys j <= i + Lk - Lq, so that
    the last query sees the last key. Of these it attends to those that it selects.

    Args:
        q: [T, H, Dqk] bf16. k: [N, H, Dqk] bf16. v: [N, H, Dv] bf16. Tokens and heads may lie any distance apart; the last
            dimension is contiguous.
        query_start_loc, key_start_loc: [R + 1] int32, not decreasing; request r has the queries from query_start_loc[r] to
            query_start_loc[r + 1] - 1, and its keys likewise. Either may be none.
        softmax_scale: of the scores. max_query_len, max_key_len: no request has more; launches are sized by them.
        selection: [T, W] int32, W at least 1; bit j of word w (the lowest is 0): the token selects key 32 w + j of its request.
            Keys from 32 W on are not selected, bits past the request's keys are ignored. None: every key that is seen.
        out: [T, H, Dv] bf16, lse_out: [T, H] float32, written; they overlap no input.
        backend: see `mla_portable.primitives`.
    Returns: (out, lse); lse is the natural logarithm of the sum of exp(softmax_scale * q.k). A query without a key has out 0
        and lse -inf. Rows that belong to no request are not written. NaN or infinity in keys and values that no query of
        their request attends to never reaches a result.
    Raises: InvalidArgument, UnknownBackend, UnsupportedRequest. Graph-safe with `out` and `lse_out`.
    """
    facts = check(
        q, k, v, query_start_loc, key_start_loc, softmax_scale, max_query_len, max_key_len, causal, selection, out, lse_out
    )
    return find(MASKED_PREFILL, backend, q, facts).call(
        q,
        k,
        v,
        query_start_loc,
        key_start_loc,
        softmax_scale=softmax_scale,
        max_query_len=max_query_len,
        max_key_len=max_key_len,
        causal=causal,
        selection=selection,
        out=out,
        lse_out=lse_out,
    )


class Facts(NamedTuple):
    """The fields of a Request that a call's arguments decide."""

    num_heads: int
    qk_head_dim: int
    v_head_dim: int
    selection: bool
    lse: bool
    rows: int


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    softmax_scale: float,
    max_query_len: int,
    max_key_len: int,
    causal: bool,
    selection: Tensor | None,
    out: Tensor | None,
    lse_out: Tensor | None,
) -> Facts:
    """Raise InvalidArgument, or return the facts."""
    where = TENSORS.where
    check_count(where, "max_query_len", max_query_len, 0, INT32_MAX)
    check_count(where, "max_key_len", max_key_len, 0, INT32_MAX)
    check_flag(where, "causal", causal)
    shape = shape_of(where, "query_start_loc", query_start_loc, 1, "[R + 1]")
    if shape[0] < 1:
        refuse(where, "query_start_loc", "shape [0]", "[R + 1], at least one value", "Pass [0] for no request.")
    sizes = TENSORS.check((q, k, v, query_start_loc, key_start_loc, selection, out, lse_out), {"R": shape[0] - 1})
    check_scale(where, "softmax_scale", softmax_scale)
    check_starts(where, "query_start_loc", query_start_loc, "T", sizes["T"], "max_query_len", max_query_len)
    check_starts(where, "key_start_loc", key_start_loc, "N", sizes["N"], "max_key_len", max_key_len)
    return Facts(sizes["H"], sizes["Dqk"], sizes["Dv"], selection is not None, lse=True, rows=rounded_rows(sizes["T"]))


def check_starts(where: str, name: str, starts: Tensor, axis: str, size: int, bound: str, longest: int) -> None:
    """The values of `name`, where nothing has to be read back for them. Raises: InvalidArgument, in the words of `where`.

    Args:
        axis, size: of the rows that `starts` divides. bound, longest: the argument that bounds the rows of a request.
    """
    if not starts.is_cpu:
        return
    values: list[int] = starts.tolist()
    lengths = [end - begin for begin, end in pairwise(values)]
    if values[0] < 0 or values[-1] > size or min(lengths, default=0) < 0:
        shown = f"values from {values[0]} to {values[-1]}" + (", decreasing" if min(lengths, default=0) < 0 else "")
        refuse(where, name, shown, f"values from 0 to {axis} = {size}, not decreasing")
    if max(lengths, default=0) > longest:
        refuse(where, bound, longest, f"at least {max(lengths)}, the most that a request of {name} has")


@isolated
def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    *,
    softmax_scale: float,
    max_query_len: int,
    max_key_len: int,
    causal: bool = True,
    selection: Tensor | None = None,
    out: Tensor | None = None,
    lse_out: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """One head of some queries of one request at a time. `dtype` is that of the arithmetic.

    Allocates about 64 MiB beyond the outputs, and a head's keys and values in `dtype`. Not graph-safe: it reads the starts.
    """
    out, lse_out = head_results(q, v.shape[2], out, lse_out)
    key_bytes = 32 if dtype == torch.float64 else 16 + 4 * max(q.shape[2], v.shape[2])
    for (first, last), (begin, end) in zip(pairwise(query_start_loc.tolist()), pairwise(key_start_loc.tolist()), strict=True):
        num_keys, after = end - begin, (end - begin) - (last - first)
        if num_keys == 0 or first == last:
            out[first:last] = 0
            lse_out[first:last] = -math.inf
            continue
        step = max(1, _CHUNK_BYTES // (num_keys * key_bytes))
        for start in range(first, last, step):
            rows = slice(start, min(start + step, last))
            seen = _seen(rows, num_keys, after - first if causal else None, selection, q.device)  # [C, Lk]
            dead, empty = ~seen.any(dim=0), ~seen.any(dim=1)
            for head in range(q.shape[1]):
                keys = k[begin:end, head].to(dtype)  # [Lk, Dqk]
                # 0 * NaN is NaN: what no query here attends to must not be multiplied
                values = v[begin:end, head].to(dtype).masked_fill_(dead.unsqueeze(1), 0.0)  # [Lk, Dv]
                scores = products(q[rows, head : head + 1].to(dtype) * softmax_scale, keys)[:, 0]  # [C, Lk]
                scores.masked_fill_(~seen, -math.inf)
                top = scores.amax(dim=1, keepdim=True).masked_fill_(empty.unsqueeze(1), 0.0)
                weights = scores.sub_(top).exp_()
                total = weights.sum(dim=1, keepdim=True)  # [C, 1]
                attended = products(weights.unsqueeze(1), values.mT)[:, 0].div_(total)  # [C, Dv]
                out[rows, head] = attended.masked_fill_(empty.unsqueeze(1), 0.0).to(out.dtype)  # 0 / 0 until here
                lse_out[rows, head] = (top + total.log())[:, 0].to(lse_out.dtype)  # log(0) is -inf
    return out, lse_out


def _seen(rows: slice, num_keys: int, after: int | None, selection: Tensor | None, device: torch.device) -> Tensor:
    """[C, Lk] bool: the tokens `rows` attend to these keys of their request.

    after: added to a token, the last key that it sees; None: it sees all.
    """
    key = torch.arange(num_keys, dtype=torch.int64, device=device)
    token = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=device).unsqueeze(1)
    seen = torch.ones((len(token), num_keys), dtype=torch.bool, device=device) if after is None else key <= token + after
    if selection is None:
        return seen
    held = min(num_keys, 32 * selection.shape[1])
    words = selection[rows][:, key[:held] // 32]  # [C, held]
    seen[:, :held] &= ((words >> (key[:held] % 32).to(torch.int32)) & 1).bool()
    seen[:, held:] = False
    return seen


MASKED_PREFILL: Final = Primitive[MaskedPrefill](
    "masked_prefill",
    module=__name__,
    facts=Facts._fields,
    results=("out", "lse"),
    stated=("finite_values",),
    reference=reference,
    reference_float32=partial(reference, dtype=torch.float32),
)
