# SPDX-License-Identifier: Apache-2.0
"""`nvidia.native_v4`: the native attention kernels on `fp8_v4` on SM90, up to 128 heads.

Two bodies serve it: the kernel of `nvidia.native_sm80`, and the kernels of `nvidia.native` and `nvidia.native_wide`. One table
says which of them a call gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from mla_portable.contracts import DecodeSchedule, Implementation, Primitive, Request, split_kv_kind
from mla_portable.layouts import FP8_V4
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL, SparseDecode, SparsePrefill
from mla_portable_nvidia.native.bind import NativeAttention
from mla_portable_nvidia.native.bind_sm80 import PREFERENCE, Sm80Attention, program, support
from mla_portable_nvidia.native.bound import BoundAttention
from mla_portable_nvidia.native.checks import check
from mla_portable_nvidia.native.choice import builds
from mla_portable_nvidia.native.sparse_decode import Tensors

__all__ = ["BODIES", "Body", "Serves", "body_of", "v4_implementations"]

_NAME: Final = "nvidia.native_v4"
_ANY: Final = 2**31 - 1

Body = Literal["sm80", "sm90"]
"""sm80: `sparse_decode_sm80.cu`, whose splits take scratch. sm90: `sparse_decode_fp8.cu` and `sparse_decode_wide.cu`."""


@dataclass(frozen=True, slots=True)
class Serves:
    """A line of the table: a body, and the most heads, query rows and keys that it serves. keys: the widths of both lists."""

    body: Body
    heads: int = _ANY
    rows: int = _ANY
    keys: int = _ANY


BODIES: Final[tuple[Serves, ...]] = (Serves("sm80"),)
"""The first line that holds a call decides. SM90's bodies have no line before they have been timed on a device."""

_MADE: Final[Mapping[Body, Callable[[Request], BoundAttention]]] = {"sm80": Sm80Attention, "sm90": NativeAttention}


def body_of(heads: int, rows: int, keys: int, table: Iterable[Serves] = BODIES) -> Body:
    """What serves a call of so many heads, query rows and keys. The last line of a table holds every call."""
    return next(line.body for line in table if heads <= line.heads and rows <= line.rows and keys <= line.keys)


class V4Attention(BoundAttention):
    """The body of a call is chosen when its launch is prepared. A schedule is the SM80 body's; the others take none."""

    def __init__(self, request: Request, table: tuple[Serves, ...] = BODIES) -> None:
        heads = request.num_heads or 0
        self._table = table
        offered: set[Body] = {line.body for line in table if heads <= line.heads}
        self._bodies = {body: _MADE[body](request) for body in offered}
        super().__init__(request)

    def _load(self, index: int) -> None:
        """Each body loads its own."""

    def cut_of(self, schedule: DecodeSchedule) -> tuple[int, ...] | None:
        planned = self._bodies.get("sm80")
        return None if planned is None else planned.cut_of(schedule)

    def prepared(self, of: Tensors, cut: tuple[int, ...] | None) -> Callable[..., None]:
        batch, query_len, heads, _ = of.q.shape
        rows = self._request.device.num_sms if self._request.batch_invariant else batch * query_len
        keys = of.indices.shape[2] + (0 if of.extra_indices is None else of.extra_indices.shape[2])
        return self._bodies[body_of(heads, rows, keys, self._table)].prepared(of, cut)


def bind_sparse_decode(request: Request) -> SparseDecode:
    """sparse_decode. Raises: NvrtcNotFound, CompilationFailed, DriverError where a kernel cannot be built here."""
    return V4Attention(request).decode


def bind_sparse_prefill(request: Request) -> SparsePrefill:
    """sparse_prefill, likewise."""
    return V4Attention(request).prefill


_BIND: Final[dict[Primitive, Any]] = {SPARSE_DECODE: bind_sparse_decode, SPARSE_PREFILL: bind_sparse_prefill}


def v4_implementations() -> Iterator[Implementation]:
    """sparse_decode and sparse_prefill on `fp8_v4` on SM90."""
    own = (each for line in BODIES if line.body == "sm90" for each in builds(FP8_V4.name, line.heads))
    shared = max((each.shared_bytes for each in own), default=0)
    for primitive, function in _BIND.items():
        decodes = primitive is SPARSE_DECODE
        yield Implementation(
            name=_NAME,
            primitive=primitive,
            support=support(("sm90",), (FP8_V4.name,), decodes=decodes, shared_memory=shared),
            bind=function,
            check=check,
            preference=PREFERENCE,
            schedule_kind=split_kv_kind(program) if decodes else None,
            prefills_as=_NAME if decodes else "",
        )
