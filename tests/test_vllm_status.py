# SPDX-License-Identifier: Apache-2.0
"""What `doctor` says of DeepSeek-V4, whose attention vLLM chooses by itself, and of the indexer. vLLM is not imported."""

from __future__ import annotations

import pytest
import torch
from commands import document, invoke
from machines import MACHINES
from spoiled import registry_with

from mla_portable.registry import Registry
from mla_portable.vllm import settings
from mla_portable.vllm.status import vllm_status
from mla_portable.vllm.v4 import choice

pytestmark = pytest.mark.usefixtures("a_bare_machine")

WORDS_OF_V4 = {
    "sm80": ("as far as it can", "mhc_pre_broadcast_tilelang", "o_proj", "compressor", "mla_portable.flash_mla"),
    "sm89": ("as far as it can", "mhc_pre_broadcast_tilelang", "o_proj", "compressor", "mla_portable.flash_mla"),
    "sm90": ("--attention-backend CUSTOM", "8 heads per GPU: sparse_decode nvidia.native", "64 heads"),
    "sm100": ("--attention-backend CUSTOM", "8 heads per GPU: sparse_decode "),
    "sm120": ("FlashInfer", choice.STOCK),
}


@pytest.mark.parametrize("arch", WORDS_OF_V4)
def test_status_tells_whose_attention_deepseek_v4_gets(arch: str, monkeypatch: pytest.MonkeyPatch):
    known = next(each for each in MACHINES.values() if each.arch == arch)
    registry = Registry(facts={"cuda": known}, environ={}, probe=False)
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.33.0")

    def said(**environ: str) -> dict[str, str]:
        return dict(vllm_status(registry, torch.device("cuda"), environ=environ).models)

    assert all(words in said()["DeepSeek-V4"] for words in WORDS_OF_V4[arch])
    assert ("528" in said().get("DeepSeek-V4.1", "")) == (arch == "sm100")
    asked = said(**{settings.ENV_MODE: "override"})["DeepSeek-V4"]
    assert asked.startswith("mla_portable's") == (arch in ("sm90", "sm100"))
    routed = said(**{settings.ENV_ROUTE: "fused"})["DeepSeek-V4"]
    assert (f"{settings.ENV_ROUTE}=fused" in routed) == (arch in ("sm90", "sm100"))
    assert not said(**{settings.ENV_MODE: "off"})
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.24.0")
    assert not said()  # vLLM has no such model yet


def test_doctor_prints_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.33.0")
    assert document("doctor")["vllm"]["models"] == []  # of a CPU
    monkeypatch.setattr("mla_portable.vllm.status._capability", lambda facts: (8, 9))
    assert document("doctor")["vllm"]["models"] == [["DeepSeek-V4", f"{choice.AS_FAR_AS}: {choice.BELOW_SM90}. {choice.FORK}"]]
    text = " ".join(invoke("doctor", registry=registry_with()).stdout.split())
    assert "DeepSeek-V4's attention in vLLM: vLLM serves DeepSeek-V4 here" in text and "fp8_einsum" in text


@pytest.mark.parametrize(
    ("machine", "version", "words"),
    [
        ("H200", "0.33.0", "vLLM's, with DeepGEMM"),
        ("A100", "0.33.0", "mla_portable's (indexer_select triton.portable"),
        ("MI300X", "0.33.0", "vLLM's: no DeepGEMM on ROCm"),
        ("BI-V150", "0.25.1+corex.4.5.0", "mla_portable's (indexer_select triton.portable"),  # without graphs
        ("BI-V150", "0.17.1+corex.4.4.0", "vLLM's: mla_portable's needs vLLM 0.24 or newer"),
        ("A100", "0.17.1", "vLLM's: mla_portable's needs vLLM 0.24 or newer"),
    ],
)
def test_status_tells_whose_indexer_vllm_runs(machine: str, version: str, words: str, monkeypatch: pytest.MonkeyPatch):
    registry = Registry(facts={"cuda": MACHINES[machine]}, environ={}, probe=False)
    monkeypatch.setattr("importlib.metadata.version", lambda package: version)

    def said(**environ: str) -> str:
        return vllm_status(registry, torch.device("cuda"), environ=environ).indexer

    assert said().startswith(words)
    asked = said(**{settings.ENV_INDEXER: "on"})
    assert asked.startswith("mla_portable's") == (not version.startswith("0.17"))
