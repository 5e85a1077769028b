# SPDX-License-Identifier: Apache-2.0
"""torch's process-wide settings are the caller's: they change neither which implementation is chosen nor what it computes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import pytest
import torch
from fake_plugins import implementation, make_plugin
from torch import Tensor

import mla_portable as mp
from mla_portable.contracts import Batch, neutral_defaults
from mla_portable.dispatch import serving
from mla_portable.layouts import FP8_DS_MLA
from mla_portable.primitives import MERGE_STATES
from mla_portable.registry import Registry

CPU = torch.device("cpu")
SCALE = 0.1
REGISTRIES: defaultdict[str, Registry] = defaultdict(lambda: Registry(environ={}))
"""One for each setting, under which it probes."""


@contextmanager
def default_device(name: str) -> Generator[None, None, None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Generator[None, None, None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Generator[None, None, None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SETTINGS = {
    "device meta": lambda: default_device("meta"),
    "with device meta": lambda: torch.device("meta"),
    "dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "dtype float64": lambda: default_dtype(torch.float64),
    "inference mode": lambda: torch.inference_mode(),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "deterministic": deterministic,
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(CPU).manual_seed(seed), dtype=torch.float32, device=CPU).bfloat16()


def int32(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=CPU)


def inputs() -> dict[str, tuple[tuple, dict]]:
    """Arguments of each convenience function; `out` is left out wherever that is allowed."""
    fp8 = FP8_DS_MLA.pack(normal(32, 512, seed=1), normal(32, 64, seed=2)).view(4, 8, 656)
    indices = int32([3, -1, 7, 9, 30, 31, 99, 0], [-1] * 8)
    sink = torch.tensor([0.5, -0.5], dtype=torch.float32, device=CPU)
    table = int32([0, 1], [2, -1])
    states = normal(3, 2, 2, 512).float(), normal(3, 2, 2, seed=4).float()
    logits = torch.empty(3, 16, dtype=torch.float32, device=CPU)
    index_cache, weights = normal(4, 8, 128, seed=6), normal(3, 2, seed=7).float()
    decode = {"softmax_scale": SCALE, "attn_sink": sink}
    slots = torch.tensor([1, -1, 5], dtype=torch.int64, device=CPU)
    rows = torch.zeros(12, 576, dtype=torch.bfloat16, device=CPU)
    return {
        "cache_write": ((normal(3, 512), normal(3, 64), fp8.clone(), slots), {}),
        "convert_indices": ((indices, int32(0, 1), table), {"block_size": 8, "compact": True}),
        "gather_upconvert": ((fp8, table, int32(9, 2), int32(0, 9)), {"out": rows}),
        "sparse_decode": ((normal(2, 1, 2, 576), fp8, indices.view(2, 1, 8)), decode),
        "sparse_prefill": ((normal(2, 2, 576), normal(32, 576, seed=3), indices), {**decode, "lengths": int32(5, 8)}),
        "merge_states": (states, {}),
        "quantize_per_tensor": ((normal(4, 5),), {}),
        "indexer_logits": (
            (normal(3, 2, 128, seed=5), weights, index_cache, int32(0, 2, 3), int32(9, 2), table),
            {"out": logits},
        ),
        "topk_select": ((normal(3, 16, seed=8).float(), int32(0, 1, 2), int32(16, 9, 3)), {"topk": 4}),
    }


def results_of_every_function(backend: str) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {}
    for name, (args, kwargs) in inputs().items():
        returned = getattr(mp, name)(*args, **kwargs, backend=backend)
        values = (args[2],) if returned is None else returned if isinstance(returned, tuple) else (returned,)
        found[name] = [value.clone() for value in values]
    return found


def step() -> tuple[dict[str, str], list[Tensor]]:
    """A layer, its planner and one mixed step: which implementations serve it, and its results."""
    limits = {"max_num_tokens": 8, "max_num_reqs": 4, "max_model_len": 64}
    spec = mp.AttentionSpec(num_heads=2, softmax_scale=SCALE, block_size=8, topk=8, kv_layout="bf16", **limits)
    layer = mp.SparseMLAAttention(spec, device="cpu")
    planner = mp.Planner(layer.planner_config())
    table = int32([0, 1], [2, 3])
    batch = Batch(np.array([0, 1, 4], np.int32), np.array([9, 12], np.int32), table)
    topk = int32([0, 8, 3, -1, 1, 2, 4, 5], *([[0, 1, 2, 3, 4, 9, 8, -1]] * 3))
    out, lse = layer.forward(normal(4, 2, 576), normal(4, 8, 576, seed=3), topk, planner.plan(batch))
    served = {part.role: str(part.decision.chosen) for part in layer.route_decision.verdict.parts}
    return served, [out.clone(), *([] if lse is None else [lse.clone()])]


def same_bits(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(
        a.device == CPU and a.dtype == b.dtype and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
        for a, b in zip(got, want, strict=True)
    )


@pytest.fixture(scope="module")
def usual() -> dict[str, object]:
    with serving(Registry(environ={})):
        return {
            "triton": results_of_every_function("triton"),
            "reference": results_of_every_function("reference"),
            "step": step(),
        }


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_function_gives_the_same_bits(usual, setting: str, backend: str):
    hostile: AbstractContextManager[object] = SETTINGS[setting]()
    with serving(REGISTRIES[setting]), hostile:
        found = results_of_every_function(backend)
    for name, want in usual[backend].items():
        assert same_bits(found[name], want), name


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_layer_is_served_by_the_same_kernels_with_the_same_bits(usual, setting: str):
    hostile: AbstractContextManager[object] = SETTINGS[setting]()
    with serving(REGISTRIES[setting]), hostile:
        served, found = step()
    assert served == usual["step"][0] and "triton.portable" in served.values()
    assert same_bits(found, usual["step"][1])


@pytest.mark.parametrize("setting", SETTINGS)
def test_explain_names_the_same_implementation(setting: str):
    hostile: AbstractContextManager[object] = SETTINGS[setting]()
    with serving(REGISTRIES[setting]), hostile:
        decision = mp.explain("sparse_decode", device="cpu", kv_layout="bf16", num_heads=2, topk=8, block_size=8)
    assert decision.chosen == "triton.portable", decision.text()


def test_checks_and_detectors_run_under_torchs_own_defaults():
    seen: list[tuple[object, ...]] = []

    def note(*args: object) -> tuple[()]:
        made = torch.empty(1)
        seen.append((made.dtype, made.device, made.is_inference(), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        return ()

    plugin = make_plugin(implementation("fast.v1", check=note), detectors=(lambda device: note() or None,))
    for limit in ("120", "0"):  # in a thread, and without a limit in the caller's own
        with default_dtype(torch.bfloat16), torch.device("meta"), torch.autocast("cpu"), torch.inference_mode():
            registry = Registry(plugins=[("fast", plugin)], environ={"MLA_PORTABLE_PLUGIN_TIMEOUT": limit}, probe=False)
            registry.decide(mp.Request(MERGE_STATES, registry.facts("cpu")))
    assert seen == [(torch.float32, CPU, False, False, False)] * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("setting", [*SETTINGS, "device cuda"])
@pytest.mark.parametrize("layout", ["bf16", "fp8_ds_mla"])
def test_a_gpu_is_served_by_a_kernel_under_each_setting(setting: str, layout: str):
    hostile = default_device("cuda") if setting == "device cuda" else SETTINGS[setting]()
    registry = Registry(environ={})
    fields = {"kv_layout": layout, "num_heads": 16, "topk": 2048, "block_size": 64, "query_len": 1, "lse": True}
    with hostile:
        decision = registry.decide(mp.Request(mp.SPARSE_DECODE, registry.facts("cuda"), **fields))
        assert decision.chosen not in (None, "reference.torch"), decision.text()
        registry.bind(decision.request)


@pytest.mark.parametrize("setting", SETTINGS)
def test_neutral_defaults_undo_each_setting_inside_and_restore_it_after(setting: str):
    def seen() -> tuple[object, ...]:
        probe = torch.empty(2, 2)
        product = torch.ones(2, 2, dtype=torch.float32, device=CPU) @ torch.ones(2, 2, dtype=torch.float32, device=CPU)
        return probe.device, probe.dtype, probe.is_inference(), product.dtype

    neutral = seen()
    hostile: AbstractContextManager[object] = SETTINGS[setting]()
    with hostile:
        before = seen()
        with neutral_defaults():
            assert seen() == neutral
        assert seen() == before
        assert setting == "deterministic" or before != neutral
