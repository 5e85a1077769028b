# SPDX-License-Identifier: Apache-2.0
"""torch's process-wide settings are the caller's: they change neither which implementation is chosen nor what it computes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from fake_plugins import implementation, make_plugin
from faulty import candidate
from machines import CPU as CPU_FACTS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import mla_portable as mp
from mla_portable.choose import Registry
from mla_portable.contracts import Batch, DeviceFacts, Primitive, Request
from mla_portable.dispatch import serving
from mla_portable.judge.problems.probe import probe_cases
from mla_portable.judge.problems.stage import Problem
from mla_portable.kit.defaults import neutral_defaults
from mla_portable.layouts.fp8_ds_mla import _e4m3_pairs
from mla_portable.primitives import (
    CACHE_WRITE,
    INDEXER_CACHE_WRITE,
    INDEXER_LOGITS,
    INDEXER_LOGITS_BLOCKS,
    INDEXER_LOGITS_RAGGED,
    INDEXER_SELECT,
    MASKED_PREFILL,
    MERGE_STATES,
    NORM_ROPE_WRITE,
    ROPE_QUANTIZE_QUERIES,
    SPARSE_DECODE,
    SPARSE_PREFILL,
)

CPU = torch.device("cpu")
WITHOUT_FP64 = replace(CPU_FACTS, has_fp64=False)
PRIMITIVES = list(Primitive.all())


@contextmanager
def switched(switch: Callable[[Any], None], value: Any, before: Any) -> Generator[None, None, None]:
    switch(value)
    try:
        yield
    finally:
        switch(before)


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    return switched(torch.set_default_dtype, dtype, torch.float32)


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "device meta": lambda: switched(torch.set_default_device, "meta", None),
    "with device meta": lambda: torch.device("meta"),
    "dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "dtype float64": lambda: default_dtype(torch.float64),
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "deterministic": lambda: switched(torch.use_deterministic_algorithms, True, False),
    "precision medium": lambda: switched(torch.set_float32_matmul_precision, "medium", "highest"),
}
EXCLUSIVE = ("with device meta", "dtype float64")


@contextmanager
def all_at_once() -> Generator[None, None, None]:
    """Every setting but those that exclude another one."""
    with ExitStack() as stack:
        for name, setting in SETTINGS.items():
            if name not in EXCLUSIVE:
                stack.enter_context(setting())
        yield


TOGETHER = {"all at once": all_at_once} | {name: SETTINGS[name] for name in EXCLUSIVE}
"""What kernels are probed under, which takes seconds: what one setting breaks, all of them break."""
REGISTRIES: defaultdict[object, Registry] = defaultdict(lambda: Registry(environ={}))
"""One for each of these, under which it probes."""


def int32(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=CPU)


def problem_of(primitive: Primitive) -> Problem:
    """The smallest one with as many features as one has, on FP8 rows where there is a cache."""
    layout = {"kv": "fp8_ds_mla", "index": "index_fp8"}.get(primitive.cache)
    problems = [case.build(CPU) for case in probe_cases(candidate(primitive, None), CPU_FACTS, layout)]
    return max(problems, key=lambda each: sum(value is not None and value is not False for value in each.kwargs.values()))


PROBLEMS = {primitive: problem_of(primitive) for primitive in PRIMITIVES}


def arguments(primitive: Primitive) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same at every call, in tensors of its own; outputs that may be left out are."""
    problem = PROBLEMS[primitive]
    args, kwargs = (tree_map(copied, each) for each in (problem.args, problem.kwargs))
    options = {name: value for name, value in (args | kwargs).items() if name in kwargs or not isinstance(value, Tensor)}
    tensors = tuple(value for value in args.values() if isinstance(value, Tensor))
    return tensors, {name: value for name, value in options.items() if name not in problem.outputs}


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


WRITTEN_BY_NAME = "q_out", "kv_cache", "index_cache", "latent_out", "k_rope_out", "index_q_out", "index_weights_out"


def written(primitive: Primitive, results: Any, given: tuple[Any, ...], options: dict[str, Any]) -> list[Tensor]:
    if primitive in (NORM_ROPE_WRITE, ROPE_QUANTIZE_QUERIES):
        return [options[name] for name in WRITTEN_BY_NAME if options.get(name) is not None]
    place = {CACHE_WRITE: 2, INDEXER_CACHE_WRITE: 1}.get(primitive)
    return list(tree_leaves(results)) if place is None else [given[place]]


def results_of_every_function(backend: str) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {}
    _e4m3_pairs.cache_clear()  # the table is made under the setting too
    for primitive in PRIMITIVES:
        args, options = arguments(primitive)
        returned = getattr(mp, str(primitive))(*args, **options, backend=backend)
        found[str(primitive)] = [value.clone() for value in written(primitive, returned, args, options)]
    _e4m3_pairs.cache_clear()
    return found


def step() -> tuple[dict[str, str], list[Tensor]]:
    """A layer, its planner and one mixed step: which implementations serve it, and its results."""
    limits = {"max_num_tokens": 8, "max_num_reqs": 4, "max_model_len": 64}
    spec = mp.AttentionSpec(num_heads=3, softmax_scale=0.1, block_size=16, topk=8, kv_layout="bf16", **limits)
    layer = mp.SparseMLAAttention(spec, device="cpu")
    planner = mp.Planner(layer.planner_config())
    batch = Batch(np.array([0, 1, 4], np.int32), np.array([9, 12], np.int32), int32([0], [2]))
    topk = int32([0, 8, 3, -1, 1, 2, 4, 5], *([[0, 1, 2, 3, 4, 9, 8, -1]] * 3))
    g = torch.Generator(CPU).manual_seed(0)
    q, rows = (torch.randn(*size, 576, generator=g, dtype=torch.float32, device=CPU).bfloat16() for size in ((4, 3), (48,)))
    out, lse = layer.forward(q, rows.view(3, 16, 576), topk, planner.plan(batch))
    served = {part.role: str(part.decision.chosen) for part in layer.route_decision.verdict.parts}
    return served, [out.clone(), *([] if lse is None else [lse.clone()])]


def bits(x: Tensor) -> Tensor:
    return x.resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def same_bits(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(
        a.device == CPU and (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(bits(a), bits(b))
        for a, b in zip(got, want, strict=True)
    )


WAYS = {
    "triton": ("triton", None),
    "reference": ("reference", None),
    "reference without float64": ("reference", {"cpu": WITHOUT_FP64}),
}


@pytest.fixture(scope="module")
def usual() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way, (backend, facts) in WAYS.items():
        with serving(Registry(facts=facts, environ={})):
            found[way] = results_of_every_function(backend)
    with serving(Registry(environ={})):
        return found | {"step": step()}


@pytest.mark.parametrize(("way", "setting"), [*(("triton", each) for each in TOGETHER), *product(list(WAYS)[1:], SETTINGS)])
def test_every_function_gives_the_same_bits(usual, setting: str, way: str):
    backend, facts = WAYS[way]
    registry = Registry(facts=facts, environ={}) if facts else REGISTRIES[setting]
    with serving(registry), (SETTINGS | TOGETHER)[setting]():
        found = results_of_every_function(backend)
    for name, want in usual[way].items():
        assert same_bits(found[name], want), name


@pytest.mark.parametrize("setting", TOGETHER)
def test_a_layer_is_served_by_the_same_kernels_with_the_same_bits(usual, setting: str):
    with serving(REGISTRIES[setting]), TOGETHER[setting]():
        served, found = step()
    assert served == usual["step"][0] and "triton.portable" in served.values()
    assert same_bits(found, usual["step"][1])


def test_code_of_plugins_runs_under_torchs_own_defaults():
    seen: list[tuple[object, ...]] = []

    def note(*args: object) -> tuple[()]:
        made = torch.empty(1)
        seen.append((made.dtype, made.device, made.is_inference(), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        return ()

    plugin = make_plugin(
        implementation("fast.v1", check=note, bind=lambda request: note() or max), detectors=(lambda device: note() or None,)
    )
    for limit in ("120", "0"):  # in a thread, and without a limit in the caller's own
        with default_dtype(torch.bfloat16), torch.device("meta"), torch.autocast("cpu"), torch.inference_mode():
            registry = Registry(plugins=[("fast", plugin)], environ={"MLA_PORTABLE_PLUGIN_TIMEOUT": limit}, probe=False)
            registry.bind(Request(MERGE_STATES, registry.facts("cpu")))
    assert [each[:4] for each in seen] == [(torch.float32, CPU, False, False)] * 6
    assert [each[4] for each in seen] == [False, False, True] * 2, "what is bound may learn"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("layout", ["bf16", "fp8_ds_mla"])
def test_a_gpu_is_served_by_a_kernel_under_each_setting(setting: str, layout: str):
    registry = Registry(environ={})
    fields = {"kv_layout": layout, "num_heads": 16, "topk": 2048, "block_size": 64, "query_len": 1, "lse": True}
    with SETTINGS[setting]():
        decision = registry.decide(Request(SPARSE_DECODE, registry.facts("cuda"), **fields))
        assert decision.chosen not in (None, "reference.torch"), decision.text()
        registry.bind(decision.request)


@pytest.mark.parametrize("setting", [name for name in SETTINGS if name not in ("deterministic", "precision medium")])
def test_neutral_defaults_undo_each_setting_inside_and_restore_it_after(setting: str):
    def seen() -> tuple[object, ...]:
        made = torch.empty(2, 2)
        product = torch.ones(2, 2, dtype=torch.float32, device=CPU) @ torch.ones(2, 2, dtype=torch.float32, device=CPU)
        return made.device, made.dtype, made.is_inference(), product.dtype

    neutral = seen()
    with SETTINGS[setting]():
        before = seen()
        with neutral_defaults():
            assert seen() == neutral
        assert seen() == before != neutral


# What the reference computes with


def bound(primitive: Primitive, facts: DeviceFacts = CPU_FACTS) -> Callable[..., Any]:
    layout = {"kv": "fp8_ds_mla", "index": "index_fp8"}.get(primitive.cache)
    registry = Registry(plugins=[("reference", "mla_portable.reference")], facts={"cpu": facts}, environ={})
    return registry.bind(Request(primitive, facts, kv_layout=layout, num_heads=2, topk=64, block_size=16))


class Dtypes(TorchDispatchMode):
    """Records the dtypes of all results, those that matrix products are taken in, and whether autocast was on."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[torch.dtype] = set()
        self.multiplied: set[torch.dtype] = set()
        self.autocast: set[bool] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(word in func.__name__.split(".")[0] for word in ("mm", "matmul", "mv", "dot", "linear", "conv", "attention")):
            self.multiplied |= {x.dtype for x in args if isinstance(x, Tensor)}
        self.autocast.add(torch.is_autocast_enabled("cpu"))
        result = func(*args, **(kwargs or {}))
        self.made |= {x.dtype for x in tree_leaves(result) if isinstance(x, Tensor)}
        return result


@pytest.mark.parametrize("primitive", PRIMITIVES, ids=str)
def test_matrix_products_are_in_float64_or_without_it_close(primitive: Primitive):
    args, options = arguments(primitive)
    scores = INDEXER_LOGITS, INDEXER_LOGITS_BLOCKS, INDEXER_LOGITS_RAGGED, INDEXER_SELECT
    multiplies = primitive in (SPARSE_DECODE, SPARSE_PREFILL, MASKED_PREFILL, *scores)
    want = tree_leaves(getattr(oracle, str(primitive))(*args, **options)) if multiplies else []
    with Dtypes() as seen:
        exact = tree_map(copied, bound(primitive)(*args, **options))
    assert seen.multiplied == ({torch.float64} if multiplies else set())
    with Dtypes() as seen:
        got = tree_leaves(bound(primitive, WITHOUT_FP64)(*args, **options))
    assert seen.multiplied == set()
    if not multiplies:
        return
    assert torch.float64 not in seen.made
    if primitive is INDEXER_SELECT:  # the oracle gives scores, and these are far apart
        want = [exact.double()]
    for mine, theirs in zip(got, want, strict=True):
        tolerance = 2**-8 if mine.dtype == torch.bfloat16 else 2e-6
        torch.testing.assert_close(mine.double(), theirs, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("primitive", PRIMITIVES, ids=str)
def test_a_negated_view_is_its_values(primitive: Primitive):
    """`x.conj().imag` and the like carry a bit that says "negated" instead of negated memory."""
    args, options = arguments(primitive)
    views = [torch._neg_view(-x) if x.is_floating_point() and x.itemsize > 1 else x.clone() for x in args]
    again = {name: x.clone() if isinstance(x, Tensor) else x for name, x in options.items()}
    want = written(primitive, bound(primitive)(*args, **options), args, options)
    got = written(primitive, bound(primitive)(*views, **again), tuple(views), again)
    assert same_bits(got, want)


@pytest.mark.parametrize("primitive", PRIMITIVES, ids=str)
def test_autocast_is_off_inside(primitive: Primitive):
    args, options = arguments(primitive)
    call = bound(primitive)
    with torch.autocast("cpu"), Dtypes() as seen:
        call(*args, **options)
    assert seen.autocast == {False}


def test_no_gradient_is_recorded():
    """A recorded call would keep the scratch of every chunk alive."""
    args, options = arguments(SPARSE_PREFILL)
    out, lse = bound(SPARSE_PREFILL)(args[0].requires_grad_(), *args[1:], **options)
    assert not out.requires_grad and not lse.requires_grad and math.isinf(lse[2, 0])


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_result_may_be_a_tensor_of_inference_mode(backend: str):
    """Engines allocate their buffers there; torch itself would refuse to write into one outside of it, half way through."""
    k_nope, k_rope = (torch.randn(shape).bfloat16() for shape in ((5, 3, 16), (5, 8)))
    with torch.inference_mode():
        out = torch.zeros(5, 3, 24, dtype=torch.bfloat16)
    mp.concat_mla_k(k_nope, k_rope, out=out, backend=backend)
    assert torch.equal(out, mp.concat_mla_k(k_nope, k_rope, backend=backend))
