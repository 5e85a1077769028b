# SPDX-License-Identifier: Apache-2.0
"""Cases, generated from what an implementation declares: only what it claims, all of what it claims.

A case that does not apply is not generated, so nothing is ever skipped while the suite runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from mla_portable.contracts import DeviceFacts, Implementation, InvalidArgument, Primitive, Request
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
from mla_portable.tools.conformance.attention_cases import attention_params
from mla_portable.tools.conformance.cache_write import cache_write_params
from mla_portable.tools.conformance.convert_indices import convert_indices_params
from mla_portable.tools.conformance.gather_upconvert import gather_upconvert_params
from mla_portable.tools.conformance.indexer_logits import indexer_logits_params
from mla_portable.tools.conformance.inputs import seed_of
from mla_portable.tools.conformance.merge_states import merge_states_params
from mla_portable.tools.conformance.params import LEVELS, Params
from mla_portable.tools.conformance.published import published_params
from mla_portable.tools.conformance.quantize_per_tensor import quantize_per_tensor_params

__all__ = ["Case", "cases_for", "check_level"]

_GENERATORS: Final[dict[Primitive, Callable[[Implementation, DeviceFacts, str], Iterable[Params]]]] = {
    CACHE_WRITE: cache_write_params,
    CONVERT_INDICES: convert_indices_params,
    GATHER_UPCONVERT: gather_upconvert_params,
    SPARSE_DECODE: attention_params,
    SPARSE_PREFILL: attention_params,
    MERGE_STATES: merge_states_params,
    QUANTIZE_PER_TENSOR: quantize_per_tensor_params,
    INDEXER_LOGITS: indexer_logits_params,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One test of one implementation.

    Attributes:
        implementation: its full name. params: everything that the inputs follow from, together with the seed.
        request: what the implementation is bound for.
    """

    implementation: str
    params: Params
    request: Request

    @property
    def primitive(self) -> Primitive:
        return self.params.primitive

    @property
    def id(self) -> str:
        """Reads aloud, e.g. `sparse_decode[triton.portable-fp8_ds_mla-pow2-h16-k2048-b64-s1-holes]`."""
        return f"{self.primitive}[{'-'.join([self.implementation, *self.params.words()])}]"

    @property
    def seed(self) -> int:
        """A hash of the id without the implementation: every implementation is given the same data."""
        return seed_of(f"{self.primitive}[{'-'.join(self.params.words())}]")

    def __str__(self) -> str:
        return self.id


def check_level(where: str, level: str) -> None:
    """Raises InvalidArgument, which names the levels, when `level` is none of them."""
    if level not in LEVELS:
        raise InvalidArgument(where, "level", got=repr(level), expected=f"one of {', '.join(LEVELS)}")


def cases_for(implementation: Implementation, device: DeviceFacts, level: str) -> tuple[Case, ...]:
    """Every case of a level, in a fixed order, for what `implementation` declares of itself on this device.

    Args:
        level: "smoke", "quick" or "full" (`params.LEVELS`).
    Returns: () where the implementation does not claim the device at all.
    """
    check_level("cases_for", level)
    if any(True for _ in implementation.support.device_reasons(device)):
        return ()
    cases: dict[str, Case] = {}
    made = _GENERATORS[implementation.primitive](implementation, device, level)
    for params in (*made, *published_params(implementation, device, level)):
        request = params.request(device)
        if not implementation.support.reasons(request):
            case = Case(implementation.name, params, request)
            cases.setdefault(case.id, case)
    return tuple(cases.values())
