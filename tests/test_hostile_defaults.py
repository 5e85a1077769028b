# SPDX-License-Identifier: Apache-2.0
"""The reference and the portable kernels give the same bits whatever torch's process-wide defaults and switches are."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mla_portable_triton
from mla_portable import reference
from mla_portable.contracts import DeviceFacts, Primitive, Request
from mla_portable.layouts import FP8_DS_MLA
from mla_portable.layouts.fp8_ds_mla import _e4m3_pairs
from mla_portable.primitives import (
    CACHE_WRITE,
    CONVERT_INDICES,
    GATHER_UPCONVERT,
    INDEXER_LOGITS,
    MERGE_STATES,
    QUANTIZE_PER_TENSOR,
    SPARSE_DECODE,
    SPARSE_PREFILL,
    TOPK_SELECT,
)

CPU = DeviceFacts(vendor="cpu", name="any CPU", arch="cpu", device_type="cpu")
WITHOUT_FP64 = DeviceFacts(vendor="cpu", name="no float64", arch="cpu", device_type="cpu", has_fp64=False)
SCALE = 192**-0.5


@contextmanager
def default_dtype(dtype: torch.dtype) -> Generator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def matmul_precision(name: str) -> Generator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


HOSTILE: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "device meta": lambda: torch.device("meta"),
    "dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "dtype float64": lambda: default_dtype(torch.float64),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "precision high": lambda: matmul_precision("high"),
    "precision medium": lambda: matmul_precision("medium"),
    "inference mode": torch.inference_mode,
}


def int32(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def arguments(primitive: Primitive) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same small problem at every call, on an FP8 cache of three blocks of 16 tokens where there is a cache."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    rows = normal(48, 576)
    cache = FP8_DS_MLA.pack(rows[:, :512], rows[:, 512:], scale_format="amax").view(3, 16, 656)
    q, indices = normal(4, 3, 576).bfloat16(), torch.randint(-3, 50, (4, 24), generator=g, dtype=torch.int32)
    table, attend = int32([2, 0, 1]), {"softmax_scale": SCALE, "attn_sink": normal(3), "lengths": int32(24, 7, 0, 30)}
    indexer = (normal(4, 3, 128).bfloat16(), normal(4, 3), normal(3, 16, 128).bfloat16(), int32(0, 4), int32(40), table)
    return {
        CACHE_WRITE: ((normal(3, 512).bfloat16(), normal(3, 64).bfloat16(), cache, torch.tensor([5, -1, 40])), {}),
        CONVERT_INDICES: ((indices, int32(0, 0, 0, 1), table), {"block_size": 16, "compact": True}),
        GATHER_UPCONVERT: ((cache, table, int32(40), int32(1)), {"out": torch.zeros(44, 576, dtype=torch.bfloat16)}),
        SPARSE_DECODE: (
            (q.view(2, 2, 3, 576), cache, indices.view(2, 2, 24)),
            attend | {"lengths": attend["lengths"].view(2, 2)},
        ),
        SPARSE_PREFILL: ((q, rows.bfloat16(), indices), attend),
        MERGE_STATES: ((normal(3, 4, 8).bfloat16(), normal(3, 4)), {}),
        QUANTIZE_PER_TENSOR: ((normal(5, 7),), {}),
        INDEXER_LOGITS: (indexer, {"out": torch.zeros(4, 50)}),
        TOPK_SELECT: ((normal(4, 50), int32(0, 1, 2, 3), int32(50, 40, 7, 2)), {"topk": 8}),
    }[primitive]


def bound(primitive: Primitive, facts: DeviceFacts = CPU, backend: Any = reference) -> Callable[..., Any]:
    class Collector:
        def add(self, implementation: Any) -> None:
            if implementation.primitive is primitive:
                self.found = implementation

        def add_costs(self, costs: str) -> None:
            pass

    collector = Collector()
    backend.mla_portable_register(collector)
    layout = "bf16" if primitive is SPARSE_PREFILL else "fp8_ds_mla" if collector.found.support.layouts else None
    return collector.found.bind(Request(primitive, facts, kv_layout=layout, num_heads=3, topk=24, block_size=16))


def bits(x: Tensor) -> Tensor:
    return x.resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def written(primitive: Primitive, results: Any, given: tuple[Any, ...]) -> list[Tensor]:
    return [given[2]] if primitive is CACHE_WRITE else list(tree_leaves(results))


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize(
    ("backend", "facts"),
    [(reference, CPU), (reference, WITHOUT_FP64), (mla_portable_triton, CPU)],
    ids=["reference-float64", "reference-float32", "triton"],
)
@pytest.mark.parametrize("primitive", list(Primitive.all()), ids=str)
def test_defaults_change_no_bit(
    primitive: Primitive, backend: Any, facts: DeviceFacts, hostile: Callable[[], AbstractContextManager[Any]]
):
    results = []
    for context in (None, hostile):
        args, options = arguments(primitive)
        call = bound(primitive, facts, backend)
        _e4m3_pairs.cache_clear()  # the table is made under the hostile defaults too
        if context is None:
            results.append(written(primitive, call(*args, **options), args))
        else:
            with context():
                made = call(*args, **options)
            results.append(written(primitive, made, args))
    _e4m3_pairs.cache_clear()
    for plain, under in zip(*results, strict=True):
        assert (under.dtype, under.device, under.shape) == (plain.dtype, plain.device, plain.shape)
        assert torch.equal(bits(under), bits(plain))


class Multiplications(TorchDispatchMode):
    """Records the dtypes that matrix products are taken in."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(word in func.__name__.split(".")[0] for word in ("mm", "matmul", "mv", "dot", "linear", "conv", "attention")):
            self.dtypes |= {x.dtype for x in args if isinstance(x, Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("primitive", list(Primitive.all()), ids=str)
def test_no_matrix_product_is_taken_in_float32(primitive: Primitive):
    args, options = arguments(primitive)
    multiplies = primitive in (SPARSE_DECODE, SPARSE_PREFILL, INDEXER_LOGITS)
    with Multiplications() as seen:
        bound(primitive)(*args, **options)
    assert seen.dtypes == ({torch.float64} if multiplies else set())
    with Multiplications() as seen:
        bound(primitive, WITHOUT_FP64)(*args, **options)
    assert seen.dtypes == set()


class OutsideOfAutocast(TorchDispatchMode):
    """Counts operators, none of which runs under autocast."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not torch.is_autocast_enabled("cpu"), func
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("primitive", list(Primitive.all()), ids=str)
def test_autocast_is_off_inside(primitive: Primitive):
    args, options = arguments(primitive)
    call = bound(primitive)
    with torch.autocast("cpu"), OutsideOfAutocast() as seen:
        call(*args, **options)
    assert seen.count > 1


@pytest.mark.parametrize("primitive", [SPARSE_DECODE, SPARSE_PREFILL, INDEXER_LOGITS], ids=str)
def test_without_float64_the_products_are_close(primitive: Primitive):
    args, options = arguments(primitive)
    want = tree_leaves(getattr(oracle, str(primitive))(*args, **options))

    class Wide(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            assert all(x.dtype != torch.float64 for x in tree_leaves(result) if isinstance(x, Tensor)), func
            return result

    with Wide():
        got = tree_leaves(bound(primitive, WITHOUT_FP64)(*args, **options))
    for mine, theirs in zip(got, want, strict=True):
        tolerance = 2**-8 if mine.dtype == torch.bfloat16 else 2e-6
        torch.testing.assert_close(mine.double(), theirs, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("primitive", list(Primitive.all()), ids=str)
def test_a_negated_view_is_its_values(primitive: Primitive):
    """`x.conj().imag` and the like carry a bit that says "negated" instead of negated memory."""
    args, options = arguments(primitive)
    floats = [i for i, x in enumerate(args) if x.is_floating_point()]
    views = [torch._neg_view(-x) if i in floats else x.clone() for i, x in enumerate(args)]
    assert all(views[i].is_neg() for i in floats)
    again = {name: x.clone() if isinstance(x, Tensor) else x for name, x in options.items()}
    want = written(primitive, bound(primitive)(*args, **options), args)
    got = written(primitive, bound(primitive)(*views, **again), tuple(views))
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(bits(mine), bits(theirs))


def test_no_gradient_is_recorded():
    """A recorded call would keep the scratch of every chunk alive."""
    args, options = arguments(SPARSE_PREFILL)
    out, lse = bound(SPARSE_PREFILL)(args[0].requires_grad_(), *args[1:], **options)
    assert not out.requires_grad and not lse.requires_grad and math.isinf(lse[2, 0])
