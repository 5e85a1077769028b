# SPDX-License-Identifier: Apache-2.0
"""ci/gpu_accuracy beside real classes: faults planted into vLLM's layers, and its checkpoints in transformers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import faults
import pytest
import torch
from vllm_engine import attend, expected, make_engine, make_step

from mla_portable.engines.vllm.impl import MLAPortableImpl

ACCURACY = Path(__file__).parents[2] / "ci" / "accuracy"


@pytest.fixture
def planted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("__init__", "forward_mqa", "forward_mha"):
        monkeypatch.setattr(MLAPortableImpl, name, getattr(MLAPortableImpl, name))  # what they are afterwards again
    faults.plant(request.param)
    return request.param


@pytest.mark.parametrize("planted", ["scale", "dropped", "shifted"], indirect=True)
def test_a_planted_fault_is_what_the_layer_computes(planted: str) -> None:
    engine = make_engine("auto")
    step = make_step(engine, [1, 1, 9], [100, 256, 40])
    metadata = engine.builder.build(0, step.common)
    keys = engine.impl.topk_indices_buffer
    before = keys.clone()
    out, _ = attend(engine, metadata, step.q)
    assert torch.equal(keys, before)
    right = expected(engine, step)[0]
    wrong = (out.float() - right.float()).norm() / right.float().norm()
    assert wrong > {"scale": 2e-3, "dropped": 1e-2, "shifted": 0.3}[planted], wrong
    if planted != "scale":  # and nothing but the keys is wrong
        step.topk.copy_({"dropped": faults.dropped, "shifted": faults.shifted}[planted](step.topk))
        wanted = expected(engine, step)[0]
        apart = (out.float() - wanted.float()).norm() / wanted.float().norm()
        assert apart < 5e-3 < wrong, apart


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """ci/accuracy's modules, importable for one test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(ACCURACY))
    yield __import__
    for name in set(sys.modules) - before:
        if str(ACCURACY) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize("name", ["v32", "glm5"])
def test_transformers_computes_the_same_from_a_checkpoint(
    name: str, programs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor fits, and with more tokens than the top-k the logits are those of the network that was trained."""
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(variable, "1")
    import transformers

    torch.set_default_dtype(torch.float32)
    forms, network, stored = (programs(each) for each in ("forms", "network", "stored"))
    form = forms.toy(forms.FORMS[name])
    torch.manual_seed(4)
    ours = network.Network(form).requires_grad_(False)
    stored.write_checkpoint(tmp_path, form.config(), ours.state_dict())
    ours.load_state_dict({key: value.float() for key, value in stored.read_checkpoint(tmp_path).items()})
    given = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    # by its class: vLLM tells transformers' automatic classes that DeepSeek-V3.2 is DeepSeek-V3
    theirs, info = getattr(transformers, form.architecture[0]).from_pretrained(tmp_path, **given)
    assert not any(info.values()), info
    ids = torch.randint(2, form.vocab, (1, 100))
    with torch.inference_mode():
        sparse, dense = (ours(ids, mode)[0] for mode in ("chosen", "dense"))
        torch.testing.assert_close(sparse, theirs(ids).logits, rtol=1e-4, atol=1e-4)
    assert (sparse - dense).abs().max() > 0.1, "the choice matters"
