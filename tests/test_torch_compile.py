# SPDX-License-Identifier: Apache-2.0
"""torch.compile of code that calls the public functions: a graph break at each call, and nothing of the call is compiled."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported

import mla_portable
from mla_portable import deep_gemm, flash_mla, primitives
from mla_portable.contracts import InvalidArgument, Primitive

FUNCTIONS: list[Callable[..., Any]] = [
    *(getattr(primitives, name) for name in Primitive.all() if name.module.startswith("mla_portable.")),
    deep_gemm.fp8_fp4_mqa_logits,
    deep_gemm.fp8_fp4_paged_mqa_logits,
    flash_mla.flash_mla_with_kvcache,
    flash_mla.flash_mla_sparse_fwd,
    flash_mla.flash_attn_varlen_func,
]


@pytest.fixture(autouse=True)
def forget_what_was_compiled() -> Iterator[None]:
    torch.compiler.reset()
    with mla_portable.use("reference"):
        yield
    torch.compiler.reset()


KV_CACHE = torch.randn((4, 64, 576), generator=torch.Generator().manual_seed(0)).bfloat16()


def attention(q: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = mla_portable.sparse_decode(q * 2.0, KV_CACHE, indices, softmax_scale=0.1)
    return out + 1.0, lse


def arguments(batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch)
    q = torch.randn((batch, 1, 16, 576), generator=generator).bfloat16()
    return q, torch.randint(256, (batch, 1, 32), generator=generator, dtype=torch.int32)


def test_a_compiled_function_has_a_graph_before_a_call_and_one_behind_it():
    graphs: list[list[str]] = []

    def backend(module: torch.fx.GraphModule, example: list[Any]) -> Callable[..., Any]:
        graphs.append([node.name for node in module.graph.nodes if node.op == "call_function"])
        return module.forward

    compiled = torch.compile(attention, backend=backend)
    given = arguments(3)
    for _ in range(2):
        for found, wanted in zip(compiled(*given), attention(*given), strict=True):
            assert torch.equal(found, wanted)
    assert graphs == [["mul"], ["add"]], "and nothing of the checks, of the registry, or of an implementation"
    for batch in range(4, 16):  # more shapes than the eight recompilations that torch allows
        given = arguments(batch)
        for found, wanted in zip(compiled(*given), attention(*given), strict=True):
            assert torch.equal(found, wanted)
    assert {name for graph in graphs for name in graph} <= {"mul", "add"}, graphs


def test_a_refusal_comes_out_of_compiled_code_as_it_is():
    q, indices = arguments(2)
    with pytest.raises(InvalidArgument, match=r"sparse_decode: indices: got torch.int64"):
        torch.compile(attention, backend="eager")(q, indices.long())


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_one_graph_for_all_is_refused_with_the_reason(function: Callable[..., Any]):
    compiled = torch.compile(lambda: function(), backend="eager", fullgraph=True)
    with pytest.raises(
        Unsupported, match=rf"(?s){function.__name__} .*mla_portable chooses a kernel in it: compile without fullgraph"
    ):
        compiled()


def test_importing_does_not_import_the_compiler():
    code = "import sys, mla_portable.primitives; print('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
