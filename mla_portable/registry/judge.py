# SPDX-License-Identifier: Apache-2.0
"""Comparing the results of a probe with the reference's: the first thing that is wrong, in words that name the symptom.

Indices and bytes are exact; attention and logits are within 2 % of the largest expected value, which no rounding of bf16 or
e4m3 inputs reaches and every wrong meaning (a wrong base, a lost scale, an index read wrongly) exceeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, cast

import torch
from torch import Tensor

from mla_portable.contracts import Primitive
from mla_portable.primitives import (
    CACHE_WRITE,
    CONVERT_INDICES,
    INDEXER_LOGITS,
    MERGE_STATES,
    QUANTIZE_PER_TENSOR,
    SPARSE_DECODE,
    SPARSE_PREFILL,
)
from mla_portable.registry.tiny import Call

__all__ = ["Results", "changed_inputs", "mismatch", "read_back", "results_of", "shared_memory"]

RELATIVE: Final = 2e-2
"""Of the largest expected magnitude, for attention and logits."""
LN2: Final = math.log(2.0)

Results = dict[str, Tensor]


def results_of(primitive: Primitive, call: Call, returned: object, *, with_lse: bool = True) -> Results | str:
    """The tensors that a call returned, by name; or what is wrong with what it returned.

    Args:
        returned: what the implementation gave back. with_lse: False where the call does not ask for the lse.
    """
    names = primitive.results
    values: tuple[Any, ...]
    if len(names) > 1:
        if not isinstance(returned, (tuple, list)) or len(cast(Any, returned)) != len(names):
            return f"returned {_kind(returned)}, expected ({', '.join(names)})"
        values = tuple(cast(Any, returned))
    else:
        values = (returned,) if names else ()
    given = _given_outputs(call)
    device = next(iter(call.args.values())).device
    found: Results = {}
    for name, value in zip(names, values, strict=True):
        if name == "lse" and not with_lse:
            continue
        if not isinstance(value, Tensor):
            return f"returned {_kind(value)} as {name}, expected a tensor"
        if value.device != device:
            return f"returned {name} on {value.device}, expected {device}"
        if name in given and value.data_ptr() != given[name].data_ptr():
            return f"returned another tensor than the `{name}` that it was given to write"
        found[name] = value
    return found


def read_back(call: Call, results: Results) -> Results:
    """Copies of the results, and of what the call's problem watches, on the CPU."""
    return {name: value.detach().cpu() for name, value in {**results, **call.watched}.items()}


def shared_memory(call: Call, earlier: Results, later: Results) -> str | None:
    """The name of a result of `later` that lies in the memory of a result of `earlier`, None when each call had its own.

    Outputs that the caller gave are left out.
    """
    given = _given_outputs(call)
    spans = [_span(value) for name, value in earlier.items() if name not in given]
    for name, value in later.items():
        begin, end = _span(value)
        if name not in given and any(max(begin, other) < min(end, other_end) for other, other_end in spans):
            return name
    return None


def _span(tensor: Tensor) -> tuple[int, int]:
    """First byte and the byte after the last one that a tensor may touch."""
    begin = tensor.data_ptr()
    if tensor.numel() == 0:
        return begin, begin
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + reach * tensor.element_size()


def _given_outputs(call: Call) -> Mapping[str, Tensor]:
    out = call.kwargs.get("out")
    if isinstance(out, tuple):
        indices, counts = cast(tuple[Tensor, Tensor], out)
        return {"indices": indices, "counts": counts}
    named = {"out": out, "lse": call.kwargs.get("lse_out")}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def _kind(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(cast(Any, value)).__name__} of {len(cast(Any, value))}"
    return type(value).__name__


def mismatch(primitive: Primitive, call: Call, got: Results, want: Results) -> tuple[str, str] | None:
    """The first difference that matters, as (symptom, where), or None.

    Args:
        call: as made for the CPU, for the inputs that a message quotes. got, want: as from `read_back`.
    """
    for name, expected in want.items():
        if name not in got:
            continue
        actual = got[name]
        if actual.dtype != expected.dtype:
            return f"{name} has dtype {_short(actual.dtype)}, expected {_short(expected.dtype)}", ""
        if actual.shape != expected.shape:
            return f"{name} has shape {list(actual.shape)}, expected {list(expected.shape)}", ""
    if primitive in (SPARSE_DECODE, SPARSE_PREFILL, MERGE_STATES):
        return _attention_mismatch(call, got, want)
    if primitive is QUANTIZE_PER_TENSOR:
        return _quantised_mismatch(got, want)
    if primitive is INDEXER_LOGITS:
        return _logits_mismatch(call, got["out"].double(), want["out"].double())
    for name, expected in want.items():
        where = _first_difference(got[name], expected)
        if where is not None:
            return _exact_text(primitive, name, call, got[name], expected, where)
    return None


def changed_inputs(before: Call, after: Call) -> str | None:
    """The name of an input that a call wrote to without being allowed to, None when all are as they were."""
    for name, value in {**before.args, **before.kwargs}.items():
        later = {**after.args, **after.kwargs}[name]
        if name not in before.written and isinstance(value, Tensor) and not _same_bytes(value, later.cpu()):
            return name
    return None


def _same_bytes(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _first_difference(got: Tensor, want: Tensor) -> tuple[int, ...] | None:
    """The coordinates of the first unequal element; NaN equals NaN."""
    differs = (got != want) & ~((got != got) & (want != want))
    return tuple(map(int, differs.nonzero()[0])) if differs.any() else None


def _exact_text(
    primitive: Primitive, name: str, call: Call, got: Tensor, want: Tensor, where: tuple[int, ...]
) -> tuple[str, str]:
    value, expected = got[where].item(), want[where].item()
    if primitive is CONVERT_INDICES:
        if name == "counts":
            return f"the count is {value}, expected {expected}", f"row {where[0]}"
        if call.kwargs.get("compact"):
            return f"entry {where[1]} of a compacted row is {value}, expected {expected}", f"row {where[0]}"
        position = int(call.args["topk_indices"][where])
        return f"position {position} became slot {value}, expected {expected}", f"row {where[0]}"
    if primitive is CACHE_WRITE:
        unit = "byte" if got.dtype == torch.uint8 else "element"
        at = f"{unit} {where[2]} of block {where[0]}, offset {where[1]}"
        if name != "kv_cache":
            return f"{unit} {where[2]} outside the cache was written", "a slot that is negative or past the cache"
        return f"{at} is {value}, expected {expected}", ""
    return f"{name} is {value:g}, expected {expected:g}", f"row {where[0]}, column {where[1]}"


def _attention_mismatch(call: Call, got: Results, want: Results) -> tuple[str, str] | None:
    """The classic symptoms by name first, then the size of the error."""
    width = want["out"].shape[-1]
    out, expected = got["out"].reshape(-1, width).double(), want["out"].reshape(-1, width).double()  # [rows * H, D]
    want_lse = want["lse"].reshape(-1).double()
    empty = want_lse == -math.inf
    heads = want["lse"].shape[-1]

    def row_of(bad: Tensor) -> str:
        return f"row {int(bad.nonzero()[0]) // heads}"

    if "lse" in got:
        lse = got["lse"].reshape(-1).double()
        bad = empty & (lse != -math.inf)
        if bad.any():
            return f"lse of a row without valid entries is {float(lse[bad][0]):g}, expected -inf", row_of(bad)
        bad = ~empty & ~torch.isfinite(lse)
        if bad.any():
            return f"lse is {float(lse[bad][0]):g} where entries are valid (inputs that do not count hold NaN)", row_of(bad)
        bad = ~empty & ((lse - want_lse).abs() > RELATIVE * max(1.0, float(want_lse[~empty].abs().max())))
        if bad.any():
            text = f"lse is {float(lse[bad][0]):.5g}, expected {float(want_lse[bad][0]):.5g}"
            return text + _lse_hint(call, lse[~empty], want_lse[~empty], empty, heads), row_of(bad)
    bad = ~torch.isfinite(out).all(dim=-1)
    if bad.any():
        return "out holds NaN or inf (inputs that do not count hold NaN)", row_of(bad)
    bad = empty & (out != 0).any(dim=-1)
    if bad.any():
        return "out of a row without valid entries is not 0", row_of(bad)
    error, largest = (out - expected).abs().amax(dim=-1), float(expected.abs().max())
    bad = error > RELATIVE * largest
    if bad.any():
        return f"out is off by {float(error.max()):.3g}, allowed {RELATIVE:g} of {largest:.3g}", row_of(bad)
    return None


def _lse_hint(call: Call, lse: Tensor, want: Tensor, empty: Tensor, heads: int) -> str:
    """What a wrong lse looks like: another base, or the sink counted in."""
    if torch.allclose(lse * LN2, want, rtol=RELATIVE, atol=RELATIVE):
        return " (it looks like base 2)"
    sink = call.kwargs.get("attn_sink")
    if isinstance(sink, Tensor):
        each = sink.double().repeat(empty.numel() // heads)[~empty]
        if torch.allclose(lse, torch.logaddexp(want, each), rtol=RELATIVE, atol=RELATIVE):
            return " (it looks as if the sink were counted in)"
    return ""


def _quantised_mismatch(got: Results, want: Results) -> tuple[str, str] | None:
    """The scale to rounding, the codes to one step: dividing and multiplying by the inverse may round differently."""
    scale, expected = float(got["scale"]), float(want["scale"])
    if not math.isclose(scale, expected, rel_tol=1e-5):
        hint = " (it looks like the inverse)" if math.isclose(scale * expected, 1.0, rel_tol=1e-4) else ""
        return f"scale is {scale:.6g}, expected {expected:.6g}{hint}", ""
    step = (got["x_q"].view(torch.uint8).int() - want["x_q"].view(torch.uint8).int()).abs()
    if int(step.max()) > 1:
        row, column = map(int, (step > 1).nonzero()[0])
        value, wanted = float(got["x_q"][row, column].float()), float(want["x_q"][row, column].float())
        return f"x_q is {value:g}, expected {wanted:g}", f"row {row}, column {column}"
    return None


def _logits_mismatch(call: Call, got: Tensor, want: Tensor) -> tuple[str, str] | None:
    """Who sees what first, then the values: without the ReLU they are negative where no weight is."""
    unseen, largest = want == -math.inf, float(want[want != -math.inf].abs().max())
    wrong = torch.where(unseen, got != want, ~((got - want).abs() <= RELATIVE * largest))
    if not wrong.any():
        return None
    row, position = map(int, wrong.nonzero()[0])
    value, expected = float(got[row, position]), float(want[row, position])
    hint = ""
    below = ~unseen & wrong & (got < 0) & (call.args["weights"] >= 0).all(dim=1, keepdim=True)
    if below.any():
        row, position = map(int, below.nonzero()[0])
        value, expected = float(got[row, position]), float(want[row, position])
        hint = " (below 0 though no weight is: it looks as if the ReLU were missing)"
    return f"the logit of position {position} is {value:g}, expected {expected:g}{hint}", f"row {row}"
