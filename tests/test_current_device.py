# SPDX-License-Identifier: Apache-2.0
"""Several GPUs in one process: a call runs on the device of its tensors, whichever device is the current one.

The GPUs are pretended: tensors lie on the CPU and say that they are on GPU 1; what is recorded is which device was current
when an implementation was called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch_reference as reference
from spoiled import Spoiled, registry_with

import mla_portable as mp
from mla_portable import dispatch
from mla_portable.accelerator import Accelerator
from mla_portable.attention import layer
from mla_portable.contracts import Batch, Primitive
from mla_portable.dispatch import serving
from mla_portable.primitives import CACHE_WRITE, CONVERT_INDICES, MERGE_STATES

HERE = 1
"""The index that all tensors claim."""


class Gpus:
    """The current device, which devices calls met, and how often it was changed."""

    def __init__(self) -> None:
        self.current, self.met, self.changes = 0, [], 0

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        self.changes += 1
        try:
            yield
        finally:
            self.current = before

    def watched(self, primitive: Primitive):
        """The reference, which notes the current device."""
        call = getattr(reference, str(primitive))

        def run(*args, **options):
            self.met.append((primitive, self.current))
            return call(*args, **options)

        return run


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    pretended = Gpus()
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: HERE)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pretended.current)
    monkeypatch.setattr(torch.cuda, "device", pretended.device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    gpu = Accelerator(torch.device("cuda", HERE))
    for module in (dispatch, layer):
        monkeypatch.setattr(module, "accelerator", lambda device: gpu)
    return pretended


@pytest.fixture
def registry(gpus: Gpus):
    plugin = Spoiled({str(primitive): gpus.watched(primitive) for primitive in Primitive.all()})
    return registry_with(("spoiled", plugin), probe=False)


@pytest.mark.parametrize("current", [0, HERE])
def test_a_convenience_call_runs_where_its_tensors_are(gpus, registry, current):
    outs, lses = torch.randn(2, 3, 4), torch.randn(2, 3)
    with serving(registry):
        for _ in range(2):  # asked of the registry, then of the cache
            gpus.current = current
            out, _ = mp.merge_states(outs, lses, backend="spoiled")
            assert gpus.current == current
            torch.testing.assert_close(out, reference.merge_states(outs, lses)[0])
    assert gpus.met == [(MERGE_STATES, HERE)] * 2
    assert (gpus.changes == 0) == (current == HERE)


@pytest.mark.parametrize("current", [0, HERE])
def test_a_layer_runs_where_it_was_built(gpus, registry, current):
    spec = mp.AttentionSpec(
        num_heads=2, kv_layout="bf16", block_size=16, topk=32, softmax_scale=0.1, max_num_tokens=8, max_num_reqs=4,
        max_model_len=64, graph=False, need_lse=True,
    )  # fmt: skip
    built = mp.SparseMLAAttention(spec, device="cpu", registry=registry, backend="spoiled")
    tokens = np.arange(4, dtype=np.int32)
    batch = Batch(query_start_loc=tokens, seq_lens=tokens[1:], block_table=torch.arange(3, dtype=torch.int32).view(3, 1))
    plan = mp.Planner(built.planner_config()).plan(batch)
    cache = torch.randn(3, 16, 576).bfloat16()
    q, topk = torch.randn(3, 2, 576).bfloat16(), torch.zeros(3, 32, dtype=torch.int32)
    gpus.current, gpus.changes, gpus.met = current, 0, []
    built.cache_write(torch.ones(1, 512).bfloat16(), torch.ones(1, 64).bfloat16(), cache, torch.tensor([16]))
    out, lse = built.forward(q, cache, topk, plan)
    assert gpus.current == current and {device for _, device in gpus.met} == {HERE}
    assert {primitive for primitive, _ in gpus.met} >= {CACHE_WRITE, CONVERT_INDICES}
    assert gpus.changes == (0 if current == HERE else 2)
    assert (cache[1, 0] == 1).all() and out.shape == (3, 2, 512) and lse.isfinite().all()
