# SPDX-License-Identifier: Apache-2.0
"""SGLang's real `Indexer` where Triton has no e4m3: it quantises, writes and chooses as its rules say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_indexer
from interpreter_rounding import round_ties_to_even
from machines import A100
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_kit import cases, pretend_for_indexer, small
from sglang_version import FUSED

from mla_portable.engines.common.e4m3_stores import StandIn
from mla_portable.engines.sglang import index_codes, serving, stock

DECODE = small(cases()["dsa_sparse_decode_ragged_prefix"])
VERIFY = replace(DECODE, name="dsa_sparse_target_verify", forward_mode=ForwardMode.TARGET_VERIFY, extend_lens=(3, 3, 3))


class Fails:
    """A kernel of SGLang's with pointers to e4m3, as Triton compiles it below compute capability 8.9; others run."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.arg_names = kernel, kernel.arg_names

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **named: Any) -> None:
            if any("float8" in str(getattr(each, "dtype", "")) for each in (*args, *named.values())):
                raise ValueError("type fp8e4nv not supported in this architecture")
            self.kernel[grid](*args, **named)

        return launch


@pytest.fixture(autouse=True)
def a100(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from test_sglang_index_codes import KERNELS

    round_ties_to_even(monkeypatch)
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, Fails(getattr(module, name)))
    monkeypatch.setattr(
        serving, "get_registry", lambda: SimpleNamespace(facts=lambda device: A100, keep=lambda key, make: make())
    )
    pretend_for_indexer(monkeypatch, A100)
    monkeypatch.setattr(stock, "_import_error", lambda module: None)
    with sglang_indexer.on_the_cpu():
        yield


@pytest.mark.parametrize("case", [DECODE, VERIFY], ids=lambda case: case.forward_mode.name.lower())
def test_a_step(case: Any, monkeypatch: pytest.MonkeyPatch):
    if FUSED:
        monkeypatch.setenv("SGLANG_DSA_FUSE_TOPK", "0")  # positions, by torch: the fused kernels are CUDA's
    worst = sglang_indexer.run(case, topk=16, fused_store=False, device="cpu", dsa_decode_backend="tilelang")
    assert worst == 0
    assert isinstance(sglang_indexer.QUANT._act_quant_kernel, StandIn)


def test_without_the_plugin_it_stops(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(index_codes, "serve", lambda facts, pools: None)
    with pytest.raises(ValueError, match="fp8e4nv not supported"):
        sglang_indexer.run(DECODE, topk=16, fused_store=False, device="cpu", dsa_decode_backend="tilelang")
