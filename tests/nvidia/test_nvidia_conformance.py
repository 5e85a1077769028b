# SPDX-License-Identifier: Apache-2.0
"""The plugin against strict stand-ins of every FlashMLA generation: checked, probed and held against the float64 oracle."""

from __future__ import annotations

import pytest
import torch
from flashmla_standins import GENERATIONS, installed
from simulated_gpu import FACTS, conforms, registry

from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL
from mla_portable_nvidia.flashmla import discovery

ATTENTION = (SPARSE_DECODE, SPARSE_PREFILL)
NAMES = {"sm90": "nvidia.flashmla", "sm100": "nvidia.flashmla_sm100"}


@pytest.mark.parametrize("arch", FACTS)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_generation_conforms(generation, arch):
    with installed(generation, arch=arch, num_sms=FACTS[arch].num_sms) as library:
        conforms(registry(arch), NAMES[arch], "smoke", *ATTENTION)
        assert library.calls and library.prefill_calls
        for primitive in ATTENTION:
            assert discovery.find_kernel(primitive, FACTS[arch]).provider == GENERATIONS[generation][0]


@pytest.mark.parametrize("generation", ["vllm 0.33", "flash_mla 2025"])
def test_the_quick_level_passes_on_both_api_generations(generation):
    with installed(generation):
        words = conforms(registry(), NAMES["sm90"], "quick", *ATTENTION)
    assert {"scheduled", "lengths", "corpus", "amax", "pow2", "strided", "k100", "h63", "h127", "b53"} <= words


def test_the_stand_in_is_strict():
    """What the adapter must convert is refused by the stand-in, else the suite above would say nothing."""
    with installed("vllm 0.33") as library:
        q = torch.zeros(1, 1, 64, 576, dtype=torch.bfloat16)
        kv = torch.zeros(2, 64, 1, 656, dtype=torch.uint8)
        good = torch.full((1, 1, 64), -1, dtype=torch.int32)
        out, lse, *_ = library.decode(q, kv, good, 1.0)
        assert torch.equal(out, torch.zeros_like(out)) and bool((lse == torch.inf).all())
        for bad in (128, -2, 2**31 - 1):
            with pytest.raises(RuntimeError, match="wild memory"):
                library.decode(q, kv, good.clone().fill_(bad), 1.0)
        with pytest.raises(RuntimeError, match="neither 64 nor 128"):
            library.decode(q[:, :, :16], kv, good, 1.0)
        with pytest.raises(RuntimeError, match="topk 100"):
            library.decode(q, kv, torch.zeros(1, 1, 100, dtype=torch.int32), 1.0)
        with pytest.raises(RuntimeError, match="foreign plan"):
            metadata, num_splits = library.own_plan(1, 1, 64, 64)
            library.decode(q, kv, good, 1.0, plan=(metadata.flip(0).contiguous(), num_splits))
        with pytest.raises(RuntimeError, match="topk 64"):
            library.prefill(q[0], kv.new_zeros(9, 1, 576).bfloat16(), good, 1.0)
