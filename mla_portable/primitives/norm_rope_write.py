# SPDX-License-Identifier: Apache-2.0
"""norm_rope_write: what stands between a layer's first projection and the next ones: norms, rotary embedding, both caches."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from mla_portable.contracts import Primitive
from mla_portable.contracts.values import CACHE_ALIGNMENT, check_scale, describe, refuse, rounded_rows
from mla_portable.dispatch import find, opaque
from mla_portable.kit.rules import CacheFacts, check_cache, shape_of
from mla_portable.kit.tensor_scales import check_kv_scale, tensor_scales
from mla_portable.kit.tensor_table import Axes, Checked, TensorTable
from mla_portable.layouts import INDEX, INDEX_HEAD_SIZE, KV, Cache, CacheLayout, layout_of, scale_formats
from mla_portable.primitives._reference import isolated
from mla_portable.primitives._rotary import (
    PLACES,
    STYLES,
    check_choice,
    check_cos_sin,
    check_given,
    check_weights,
    cosines_and_sines,
    layer_norm,
    rms_norm,
    rotate,
    rotate_at,
)
from mla_portable.primitives.cache_write import write_rows

__all__ = ["NORM_ROPE_WRITE", "NormRopeWrite", "norm_rope_write"]

TENSORS: Final = TensorTable(
    "norm_rope_write",
    {
        "positions": Axes("T", torch.int64),
        "slot_mapping": Axes("T", torch.int64, optional=True),
        "q_a": Axes("T Q", torch.bfloat16, optional=True, not_empty="Q"),
        "latent": Axes("T key", torch.bfloat16, optional=True),
        "index_key": Axes("T width", torch.bfloat16, optional=True),
        "cos_sin": Checked(optional=True),
        "q_norm": Checked(optional=True),
        "kv_norm": Checked(optional=True),
        "index_norm[0]": Checked(optional=True),
        "index_norm[1]": Checked(optional=True),
        "kv_cache": Checked(optional=True, written=True),
        "index_cache": Checked(optional=True, written=True),
        "q_out": Axes("T Q", torch.bfloat16, optional=True, written=True),
        "latent_out": Axes("T latent", torch.bfloat16, optional=True, written=True),
        "k_rope_out": Axes("T rope", torch.bfloat16, optional=True, written=True),
    },
    given="key latent rope width",
)


class NormRopeWrite(Protocol):
    """Norms, rotary embedding and both cache writes of new tokens; each of the three parts may be absent.

    q_a [T, Q] bf16 -> q_out [T, Q] bf16. latent [T, V + R] bf16 -> a row of kv_cache, latent_out [T, V], k_rope_out [T, R].
    index_key [T, 128] bf16 -> a row of index_cache. positions [T] int64; cos_sin [P, R] bf16 or float32; slot_mapping [T]
    int64: a slot that is negative or past a cache is skipped there. Rows of inputs and outputs have any stride.
    """

    def __call__(
        self,
        q_a: Tensor | None,
        latent: Tensor | None,
        index_key: Tensor | None,
        positions: Tensor,
        cos_sin: Tensor | None,
        *,
        q_norm: Tensor | None,
        kv_norm: Tensor | None,
        index_norm: tuple[Tensor, Tensor] | None = None,
        eps: float,
        index_eps: float | None = None,
        kv_cache: Any,
        slot_mapping: Tensor | None,
        index_cache: Tensor | None = None,
        rope_style: str = "interleaved",
        index_rope_style: str = "neox",
        index_rope_at: str = "first",
        scale_format: str = "pow2",
        q_out: Tensor | None,
        latent_out: Tensor | None = None,
        k_rope_out: Tensor | None = None,
    ) -> None: ...


@opaque
def norm_rope_write(
    q_a: Tensor | None,
    latent: Tensor | None,
    index_key: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor | None,
    *,
    q_norm: Tensor | None,
    kv_norm: Tensor | None,
    index_norm: tuple[Tensor, Tensor] | None = None,
    eps: float,
    index_eps: float | None = None,
    kv_cache: Cache | None,
    slot_mapping: Tensor | None,
    index_cache: Tensor | None = None,
    rope_style: str = "interleaved",
    index_rope_style: str = "neox",
    index_rope_at: str = "first",
    scale_format: str = "pow2",
    q_out: Tensor | None,
    latent_out: Tensor | None = None,
    k_rope_out: Tensor | None = None,
    kv_scale: Tensor | None = None,
    kv_layout: str | None = None,
    index_layout: str | None = None,
    backend: str | None = None,
) -> None:
    """Norm the results of a layer's first projection, rotate its keys, and write both caches.

    Three parts, each of which may be None together with all that belongs to it. Rows of inputs and of outputs may lie any
    distance apart, as slices of one projection do; the last dimension is contiguous.

    Args:
        q_a: [T, Q] bf16: RMS norm with q_norm -> q_out.
        latent: [T, V + R] bf16: RMS norm of the first V numbers with kv_norm, rotation of the last R -> a row of kv_cache. V
            and R are those of the cache's layout; where R is 0 nothing is rotated.
        index_key: [T, 128] bf16: layer norm with index_norm, rotation of the first or last R numbers -> a row of index_cache.
        positions: [T] int64. A position outside of the table is taken for the nearest one in it.
        cos_sin: [P, R] bf16 or float32: R / 2 cosines, then R / 2 sines, with YaRN's factor where there is one. None where
            nothing is rotated.
        q_norm: [Q], kv_norm: [V], index_norm: (weight [128], bias [128]), each bf16 or float32.
        eps: of both RMS norms. index_eps: of the layer norm, None for `eps`.
        kv_cache, index_cache: paged caches, written as `cache_write` and `indexer_cache_write` write them. kv_cache may be None
            where latent_out or k_rope_out is given.
        slot_mapping: [T] int64, of both caches. A token whose slot is negative or past a cache is not written there; it is
            still normed and rotated into the outputs.
        rope_style: "interleaved" rotates the numbers 2i and 2i + 1, "neox" i and i + R / 2. index_rope_style: of index_key.
        index_rope_at: "first" or "last", where the R rotary numbers of index_key are.
        scale_format: of the rows of kv_cache, "pow2" or "amax". The indexer's keys have "pow2" scales.
        q_out: [T, Q] bf16. latent_out: [T, V] bf16, the normed latent. k_rope_out: [T, R] bf16, the rotated key. Written.
        kv_scale: as of `cache_write`. kv_layout, backend: see `mla_portable.primitives`. index_layout: likewise of index_cache.
    Norms and rotations are computed in float32. Each result is rounded to bf16 once; a cached row is made of the rounded
    numbers, and so is the rotation of a key that was normed. NaN stays in its token.
    Raises: InvalidArgument, UnknownBackend, UnsupportedRequest. Graph-safe.
    """
    facts = check(
        q_a,
        latent,
        index_key,
        positions,
        cos_sin,
        q_norm,
        kv_norm,
        index_norm,
        eps,
        index_eps,
        kv_cache,
        slot_mapping,
        index_cache,
        rope_style,
        index_rope_style,
        index_rope_at,
        scale_format,
        q_out,
        latent_out,
        k_rope_out,
        kv_scale,
        kv_layout,
        index_layout,
    )
    find(NORM_ROPE_WRITE, backend, positions, facts).call(
        q_a,
        latent,
        index_key,
        positions,
        cos_sin,
        q_norm=q_norm,
        kv_norm=kv_norm,
        index_norm=index_norm,
        eps=eps,
        index_eps=index_eps,
        kv_cache=kv_cache,
        slot_mapping=slot_mapping,
        index_cache=index_cache,
        rope_style=rope_style,
        index_rope_style=index_rope_style,
        index_rope_at=index_rope_at,
        scale_format=scale_format,
        q_out=q_out,
        latent_out=latent_out,
        k_rope_out=k_rope_out,
        **tensor_scales(kv_scale),
    )


class Facts(NamedTuple):
    """The fields of a Request that a call's arguments decide. Of two caches: the block size is that of attention's, the rest
    holds for both."""

    kv_layout: str | None
    index_layout: str | None
    block_size: int | None
    cache_alignment: int
    uneven_blocks: bool
    scale_format: str | None
    rows: int


def check(
    q_a: Tensor | None,
    latent: Tensor | None,
    index_key: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor | None,
    q_norm: Tensor | None,
    kv_norm: Tensor | None,
    index_norm: tuple[Tensor, Tensor] | None,
    eps: float,
    index_eps: float | None,
    kv_cache: Cache | None,
    slot_mapping: Tensor | None,
    index_cache: Tensor | None,
    rope_style: str,
    index_rope_style: str,
    index_rope_at: str,
    scale_format: str,
    q_out: Tensor | None,
    latent_out: Tensor | None,
    k_rope_out: Tensor | None,
    kv_scale: Tensor | None,
    kv_layout: str | None,
    index_layout: str | None,
) -> Facts:
    """Raise InvalidArgument, or return the facts."""
    where = TENSORS.where
    shape_of(where, "positions", positions, 1, "[T]")
    device = positions.device
    if q_a is None and latent is None and index_key is None:
        refuse(where, "q_a, latent and index_key", "None", "at least one of them")
    check_given(where, q_a, "q_a", {"q_norm": q_norm, "q_out": q_out}, {})
    outputs = {"latent_out": latent_out, "k_rope_out": k_rope_out}
    check_given(where, latent, "latent", {"kv_norm": kv_norm}, {"kv_cache": kv_cache, **outputs, "kv_scale": kv_scale})
    check_given(where, index_key, "index_key", {"index_norm": index_norm, "index_cache": index_cache}, {})
    if latent is not None and kv_cache is None and latent_out is None and k_rope_out is None:
        refuse(where, "kv_cache", "None", "a cache, or latent_out or k_rope_out: there is latent, and nothing to write it to")
    if slot_mapping is None and not (kv_cache is None and index_cache is None):
        refuse(where, "slot_mapping", "None", "[T] int64, because there is a cache")
    for argument, style in (("rope_style", rope_style), ("index_rope_style", index_rope_style)):
        check_choice(where, argument, style, STYLES)
    check_choice(where, "index_rope_at", index_rope_at, PLACES)
    check_scale(where, "eps", eps)
    if index_eps is not None:
        check_scale(where, "index_eps", index_eps)

    sizes = {"key": 0, "latent": 0, "rope": 0, "width": INDEX_HEAD_SIZE}
    cache: CacheFacts | None = None
    index: CacheFacts | None = None
    written: str | None = None
    if latent is not None:
        _, sizes["key"] = shape_of(where, "latent", latent, 2, "[T, V + R]")
        sizes["latent"] = shape_of(where, "kv_norm", kv_norm, 1, "[V]")[0]
        if kv_cache is not None:
            cache = check_cache(where, "kv_cache", kv_cache, device, kv_layout=kv_layout)
            layout = cache.layout
            check_kv_scale(where, layout, kv_scale, device)
            sizes["key"], sizes["latent"] = layout.key_width, layout.value_width
            written = scale_format if layout.scale_formats else None
            formats = layout.scale_formats or scale_formats()
        else:
            formats = scale_formats()
        check_choice(where, "scale_format", scale_format, formats)
        sizes["rope"] = sizes["key"] - sizes["latent"]
        if sizes["rope"] < 0:
            refuse(where, "latent", f"shape {list(latent.shape)}", f"[T, V + R], at least V = {sizes['latent']} wide")
        check_weights(where, "kv_norm", kv_norm, sizes["latent"], device)
    if index_cache is not None:
        index = check_cache(where, "index_cache", index_cache, device, INDEX, kv_layout=index_layout)
    if index_norm is not None:
        pair: Any = index_norm
        if type(pair) is not tuple or len(pair) != 2:
            refuse(where, "index_norm", describe(pair), f"a tuple (weight [{INDEX_HEAD_SIZE}], bias [{INDEX_HEAD_SIZE}])")
        for at, each in enumerate(pair):
            check_weights(where, f"index_norm[{at}]", each, INDEX_HEAD_SIZE, device)
    if q_a is not None:
        check_weights(where, "q_norm", q_norm, shape_of(where, "q_a", q_a, 2, "[T, Q]")[1], device)
    _check_rotation(cos_sin, sizes["rope"], index_key is not None, device)

    weight, bias = (None, None) if index_norm is None else index_norm
    tensors = positions, slot_mapping, q_a, latent, index_key, cos_sin, q_norm, kv_norm, weight, bias
    TENSORS.check((*tensors, kv_cache, index_cache, q_out, latent_out, k_rope_out), sizes)
    caches = [each for each in (cache, index) if each is not None]
    return Facts(
        None if cache is None else cache.kv_layout,
        None if index is None else index.kv_layout,
        caches[0].block_size if caches else None,
        min((each.cache_alignment for each in caches), default=CACHE_ALIGNMENT),
        any(each.uneven_blocks for each in caches),
        written,
        rounded_rows(sizes["T"]),
    )


def _check_rotation(cos_sin: Tensor | None, rope: int, has_index: bool, device: torch.device) -> None:
    """The table is there where something is rotated, and as wide as that."""
    where = TENSORS.where
    if cos_sin is None:
        if rope or has_index:
            refuse(where, "cos_sin", "None", "[P, R], because there are keys to rotate")
        return
    width = check_cos_sin(where, cos_sin, device)
    if rope not in (0, width):
        refuse(where, "cos_sin", f"shape {list(cos_sin.shape)}", f"[P, {rope}], as the rotary part of latent is {rope} wide")
    if has_index and width > INDEX_HEAD_SIZE:
        refuse(where, "cos_sin", f"shape {list(cos_sin.shape)}", f"[P, R] with R of at most {INDEX_HEAD_SIZE}, for index_key")


@isolated
def reference(
    q_a: Tensor | None,
    latent: Tensor | None,
    index_key: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor | None,
    *,
    q_norm: Tensor | None,
    kv_norm: Tensor | None,
    index_norm: tuple[Tensor, Tensor] | None = None,
    eps: float,
    index_eps: float | None = None,
    kv_cache: Cache | None,
    slot_mapping: Tensor | None,
    index_cache: Tensor | None = None,
    rope_style: str = "interleaved",
    index_rope_style: str = "neox",
    index_rope_at: str = "first",
    scale_format: str = "pow2",
    q_out: Tensor | None,
    latent_out: Tensor | None = None,
    k_rope_out: Tensor | None = None,
    kv_scale: Tensor | None = None,
    kv_layout: str | None = None,
    index_layout: str | None = None,
) -> None:
    """Float32 arithmetic; rows are exactly what the layouts' `pack` makes. Synchronises the host on a GPU. Not graph-safe."""
    where = TENSORS.where
    if q_a is not None and q_norm is not None and q_out is not None:
        q_out.copy_(rms_norm(q_a, q_norm, eps))
    angles = None if cos_sin is None else cosines_and_sines(cos_sin, positions)
    if latent is not None and kv_norm is not None:
        width = kv_norm.shape[0]
        normed, rope = rms_norm(latent[:, :width], kv_norm, eps), latent[:, width:]
        if rope.shape[1] and angles is not None:
            rope = rotate(rope, *angles, rope_style)
        if latent_out is not None:
            latent_out.copy_(normed)
        if k_rope_out is not None:
            k_rope_out.copy_(rope)
        if kv_cache is not None and slot_mapping is not None:
            layout = layout_of(kv_cache, name=kv_layout, where=where)
            write_rows(layout, kv_cache, slot_mapping, normed, rope, scale_format, kv_scale)
    if index_key is not None and index_norm is not None and index_cache is not None and angles and slot_mapping is not None:
        layout = layout_of(index_cache, name=index_layout, where=where, argument="index_cache", cache=INDEX)
        key = layer_norm(index_key, *index_norm, eps if index_eps is None else index_eps)
        key = rotate_at(key, *angles, index_rope_style, index_rope_at)
        write_rows(layout, index_cache, slot_mapping, key, key[:, :0], index_scale_format(layout))


def index_scale_format(layout: CacheLayout) -> str:
    """The scales of the indexer's keys: "pow2", or the first format of a layout that has no such scales."""
    return layout.scale_format_near("pow2")


NORM_ROPE_WRITE: Final = Primitive[NormRopeWrite](
    "norm_rope_write",
    module=__name__,
    facts=Facts._fields,
    cache=KV,
    reference=reference,
)
