# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 3 behind masked_prefill: the suite on a strict stand-in, rows of no request, the pass behind it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fa3_standins import SCHEMAS, installed
from machines import H200
from simulated_gpu import FACTS, conforms, registry
from torch import Tensor
from torch_passes import TorchPromptLse

from mla_portable.contracts import MLAPortableError, Request
from mla_portable.judge.problems.masked_prefill import masked_prefill as oracle
from mla_portable.primitives import MASKED_PREFILL
from mla_portable_nvidia.fa3.masked_prefill import bind_fa3_prompts, prompt_implementations
from mla_portable_nvidia.fa3.operators import find_fa3_prompts
from mla_portable_nvidia.fa3.prompt_lse import PromptLse
from mla_portable_nvidia.native.masked_prefill import masked_prefill_implementations

DIMS = {"qk_head_dim": 192, "v_head_dim": 128}


@pytest.mark.parametrize("package", SCHEMAS)
def test_every_package_conforms(package: str):
    with installed(package) as library:
        machine = registry(offered=prompt_implementations(device_types=("cpu",)))
        conforms(machine, "nvidia.flash_attention3", "smoke", MASKED_PREFILL)
        assert library.prompts and not library.calls


def test_the_quick_level_passes_whatever_the_lse_without_keys_is():
    with installed(empty=float("inf")) as library:
        machine = registry(offered=prompt_implementations(device_types=("cpu",)))
        words = conforms(machine, "nvidia.flash_attention3", "quick", MASKED_PREFILL)
        assert {"finite", "keyless", "fewer", "idle", "full", "apart", "lse_none"} <= words
        assert min(longest for *_, longest in library.prompts) == 2, "a bound of 1 would change the tiles"


def request(**changes: Any) -> Request:
    return Request(MASKED_PREFILL, FACTS["sm90"], num_heads=3, **{**DIMS, "finite_values": True, "lse": True, **changes})


def call(queries: int = 40, keys: int = 50, before: int = 2, behind: int = 3) -> tuple[dict[str, Any], Tensor, Tensor]:
    g = torch.Generator().manual_seed(queries)
    tokens = before + queries + behind
    arguments = {
        "q": torch.randn(tokens, 3, 192, generator=g).bfloat16(),
        "k": torch.randn(keys, 3, 192, generator=g).bfloat16(),
        "v": torch.randn(keys, 3, 128, generator=g).bfloat16(),
        "query_start_loc": torch.tensor([before, before + queries], dtype=torch.int32),
        "key_start_loc": torch.tensor([0, keys], dtype=torch.int32),
        "softmax_scale": 0.1,
        "max_query_len": queries,
        "max_key_len": keys,
    }
    out, lse = torch.full((tokens, 3, 128), 7.0, dtype=torch.bfloat16), torch.full((tokens, 3), 7.0)
    return arguments, out, lse


@pytest.mark.parametrize("keys", [50, 0])
def test_rows_of_no_request_are_not_written(keys: int):
    arguments, out, lse = call(keys=keys)
    with installed():
        returned = bind_fa3_prompts(request())(**arguments, out=out, lse_out=lse)
    assert returned[0] is out and returned[1] is lse
    for rows in (slice(0, 2), slice(42, None)):
        assert bool((out[rows] == 7).all()) and bool((lse[rows] == 7).all())
    want, want_lse = oracle(**arguments)
    torch.testing.assert_close(out[2:42].double(), want[2:42], atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse[2:42].double(), want_lse[2:42], atol=1e-4, rtol=1e-4)


def test_without_an_lse_there_is_no_pass(monkeypatch):
    monkeypatch.setattr(TorchPromptLse, "__call__", lambda *_: pytest.fail("told"))
    arguments, out, _ = call()
    with installed():
        _, lse = bind_fa3_prompts(request(lse=False))(**arguments, out=out)
    assert lse.numel() == 0
    torch.testing.assert_close(out[2:42].double(), oracle(**arguments)[0][2:42], atol=1e-2, rtol=1e-2)


def test_what_is_not_aligned_is_copied_and_what_lies_around_stays():
    arguments, _, lse = call()
    for name in ("q", "k", "v"):
        wide = torch.full((*arguments[name].shape[:2], arguments[name].shape[2] + 5), float("nan"), dtype=torch.bfloat16)
        arguments[name] = wide[..., 1:-4].copy_(arguments[name])
    odd = torch.full((45, 3, 131), 7.0, dtype=torch.bfloat16)
    with installed():
        bind_fa3_prompts(request())(**arguments, out=odd[..., 1:129], lse_out=lse)
    want, _ = oracle(**arguments)
    torch.testing.assert_close(odd[2:42, :, 1:129].double(), want[2:42], atol=1e-2, rtol=1e-2)
    odd[2:42, :, 1:129] = 7
    assert bool((odd == 7).all())


def test_it_serves_only_under_the_promise_and_then_before_the_native_kernel():
    (fa3,), (native,) = prompt_implementations(), masked_prefill_implementations()
    asked = Request(MASKED_PREFILL, H200, num_heads=16, **DIMS, lse=True, graph=True)
    assert [reason.subject for reason in fa3.support.reasons(asked)] == ["finite_values"]
    promised = asked.but(finite_values=True)
    assert fa3.support.reasons(promised) == () and fa3.preference < native.preference
    assert [reason.subject for reason in fa3.support.reasons(promised.but(selection=True))] == ["selection"]
    assert [reason.subject for reason in fa3.support.reasons(promised.but(v_head_dim=64))] == ["head dims"]
    assert native.support.reasons(asked.but(selection=True)) == ()


def test_without_a_package_it_says_why():
    operator, reasons = find_fa3_prompts({})
    assert operator is None and [reason.subject for reason in reasons] == ["provider vllm", "provider sgl_kernel"]
    with pytest.raises(MLAPortableError, match="nothing brings FlashAttention 3 here"):
        bind_fa3_prompts(request())


@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (70, 3), (130, 40)])
def test_the_pass_brings_the_lse_into_place(tokens: int, heads: int):
    lse = torch.randn(heads, tokens)
    lse[:, ::7], lse[0, 1::5] = math.inf, -math.inf
    out = torch.full((tokens, heads + 2), 7.0)
    first, last = min(2, tokens - 1), max(tokens - 3, 1)
    starts = torch.tensor([first, first, last], dtype=torch.int32)
    PromptLse()(out[:, :heads], lse, starts)
    want = torch.full_like(out, 7.0)
    want[first:last, :heads] = lse.T[first:last].masked_fill(lse.T[first:last] == math.inf, -math.inf)
    assert torch.equal(out, want)
