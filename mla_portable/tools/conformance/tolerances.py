# SPDX-License-Identifier: Apache-2.0
"""How far a result may lie from the float64 oracle: one table, primitive x storage x quantity.

`storage` is what the numbers were read from: "bf16", or the scale format of an FP8 cache, "pow2" or "amax"; for
primitives without a cache it is the dtype, or "any". Bytes, slots and counts have no row of slack: they are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mla_portable.contracts import Primitive
from mla_portable.primitives import (
    CACHE_WRITE,
    CONVERT_INDICES,
    GATHER_UPCONVERT,
    INDEXER_LOGITS,
    MERGE_STATES,
    QUANTIZE_PER_TENSOR,
    SPARSE_DECODE,
    SPARSE_PREFILL,
)

__all__ = ["TOLERANCES", "Tolerance", "tolerance", "tolerance_table_markdown"]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """A limit on the distance to the oracle: `|got - expected| <= max(abs, rel * magnitude)`.

    Attributes:
        abs, rel: both 0 means bit for bit.
        magnitude: what `rel` multiplies: the "row"'s largest expected absolute value, the "element"'s own, or its "step",
            half the distance between neighbours of the target dtype.
        cosine: limit on 1 - 2 sum(x y) / sum(x x + y y) over the whole tensor; None where it is not judged.
        origin: where the figures come from.
    """

    abs: float
    rel: float
    origin: str
    magnitude: str = "element"
    cosine: float | None = None

    @property
    def exact(self) -> bool:
        return self.abs == 0 and self.rel == 0


_BITS = Tolerance(0, 0, "the contract defines every bit")
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

TOLERANCES: Final[dict[tuple[Primitive, str, str], Tolerance]] = {
    (CACHE_WRITE, "any", "cache"): _BITS,
    (CONVERT_INDICES, "any", "indices"): _BITS,
    (CONVERT_INDICES, "any", "counts"): _BITS,
    (GATHER_UPCONVERT, "bf16", "latent"): _BITS,
    (GATHER_UPCONVERT, "pow2", "latent"): _BITS,
    (GATHER_UPCONVERT, "amax", "latent"): Tolerance(
        0, 2**-7, "one bf16 step: the product may be rounded once or, through float32, twice"
    ),
    (GATHER_UPCONVERT, "any", "rope"): _BITS,
    **{
        (primitive, storage, quantity): row
        for primitive in (SPARSE_DECODE, SPARSE_PREFILL)
        for storage, out, lse in (("bf16", _OUT, _LSE), ("pow2", _OUT, _LSE), ("amax", _OUT_AMAX, _LSE_AMAX))
        for quantity, row in (("out", out), ("lse", lse))
    },
    (MERGE_STATES, "float32", "out"): Tolerance(
        1e-6, 5e-5, "exp(lse - total) in float32, where lse may be 300 and has steps of 3e-5", "row", cosine=1e-9
    ),
    (MERGE_STATES, "bfloat16", "out"): Tolerance(1e-6, 4.2e-3, "one rounding to bf16, 2^-8", "row", cosine=1e-5),
    (MERGE_STATES, "float16", "out"): Tolerance(1e-6, 6e-4, "one rounding to fp16, 2^-11", "row", cosine=1e-6),
    (MERGE_STATES, "any", "lse"): Tolerance(1e-5, 1e-6, "float32 exp and log"),
    (QUANTIZE_PER_TENSOR, "any", "scale"): Tolerance(0, 3e-7, "a float32 division, correctly rounded or not"),
    (QUANTIZE_PER_TENSOR, "any", "x_q"): Tolerance(0, 1.001, "the nearest value of the target dtype", "step"),
    (INDEXER_LOGITS, "any", "out"): Tolerance(
        1e-4, 1e-3, "float32 sums of exact products, over 128 channels and then over heads, whose terms may cancel", "row"
    ),
}


def tolerance(primitive: Primitive, storage: str, quantity: str) -> Tolerance:
    """The row for a quantity; a row for "any" storage serves all."""
    return TOLERANCES.get((primitive, storage, quantity)) or TOLERANCES[primitive, "any", quantity]


def tolerance_table_markdown() -> str:
    """The table for docs/numerics.md, generated so that page and suite cannot disagree."""
    lines = ["| primitive | read from | quantity | abs | rel | of | 1 - cosine | why |", "|---|---|---|---|---|---|---|---|"]
    for (primitive, storage, quantity), row in TOLERANCES.items():
        cosine = "" if row.cosine is None else f"{row.cosine:.3g}"
        limits = "bit for bit | | |" if row.exact else f"{row.abs:.3g} | {row.rel:.3g} | {row.magnitude} |"
        lines.append(f"| {primitive} | {storage} | {quantity} | {limits} {cosine} | {row.origin} |")
    return "\n".join(lines)
