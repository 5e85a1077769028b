# SPDX-License-Identifier: Apache-2.0
"""What `doctor` says of DeepSeek-V4, whose attention vLLM chooses by itself, and of the indexer. vLLM is not imported."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import document, invoke
from machines import MACHINES
from spoiled import registry_with

from mla_portable.choose import Registry
from mla_portable.engines.vllm import layer_choice, settings
from mla_portable.engines.vllm.status import vllm_status
from mla_portable.engines.vllm.v4 import choice

pytestmark = pytest.mark.usefixtures("a_bare_machine")

INTERFACES = Path(__file__).parent / "vllm" / "interfaces"
"""Of vLLM's versions: the names in its modules."""
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a vLLM whose modules have the names of a version's, and nothing that runs."""
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:  # tests/vllm, which a search for vLLM's imports
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(path: str, names: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            "raise ImportError('vLLM is not to be imported')\n" + "".join(f"{name} = None\n" for name in names.split())
        )

    def install(version: str, interface: str = "0.33.0", *, v4: bool = True) -> None:
        monkeypatch.setattr("importlib.metadata.version", lambda package: version)
        write("vllm/__init__.py", "")
        for path, names in json.loads((INTERFACES / f"{interface}.json").read_text())["seams"].items():
            if names:
                write(path, names)
        if v4:
            text = f"def {choice.SELECT}(): ...\nif True:\n    from elsewhere import {choice.STOCK}\n"
            write("vllm/models/deepseek_v4/nvidia/model.py", "")
            (tmp_path / "vllm/models/deepseek_v4/nvidia/model.py").write_text(text)

    return install


WORDS_OF_V4 = {
    "sm80": ("as far as it can", "mhc_pre_broadcast_tilelang", "o_proj", "compressor", "mla_portable.flash_mla"),
    "sm89": ("as far as it can", "mhc_pre_broadcast_tilelang", "o_proj", "compressor", "mla_portable.flash_mla"),
    "sm90": ("--attention-backend CUSTOM", "8 heads per GPU: sparse_decode nvidia.native", "64 heads"),
    "sm100": ("--attention-backend CUSTOM", "8 heads per GPU: sparse_decode "),
    "sm120": ("FlashInfer", choice.STOCK),
}


@pytest.mark.parametrize("arch", WORDS_OF_V4)
def test_status_tells_whose_attention_deepseek_v4_gets(arch: str, install: Install, tmp_path: Path):
    known = next(each for each in MACHINES.values() if each.arch == arch)
    registry = Registry(facts={"cuda": known}, environ={}, probe=False)
    install("0.33.0")

    def said(**environ: str) -> dict[str, str]:
        return dict(vllm_status(registry, torch.device("cuda"), environ=environ).models)

    assert all(words in said()["DeepSeek-V4"] for words in WORDS_OF_V4[arch])
    assert ("528" in said().get("DeepSeek-V4.1", "")) == (arch == "sm100")
    asked = said(**{settings.ENV_MODE: "override"})["DeepSeek-V4"]
    assert asked.startswith("mla_portable's") == (arch in ("sm90", "sm100"))
    routed = said(**{settings.ENV_ROUTE: "fused"})["DeepSeek-V4"]
    assert (f"{settings.ENV_ROUTE}=fused" in routed) == (arch in ("sm90", "sm100"))
    assert not said(**{settings.ENV_MODE: "off"})
    (tmp_path / "vllm/models/deepseek_v4/nvidia/model.py").write_text(f"def {choice.SELECT}(): ...\n")
    assert not said()  # the plugin would leave it alone, whatever the version


def test_doctor_prints_it(monkeypatch: pytest.MonkeyPatch, install: Install):
    install("0.33.0")
    assert document("doctor")["vllm"]["models"] == []  # of a CPU
    monkeypatch.setattr("mla_portable.engines.vllm.status._capability", lambda facts: (8, 9))
    assert document("doctor")["vllm"]["models"] == [["DeepSeek-V4", f"{choice.AS_FAR_AS}: {choice.BELOW_SM90}. {choice.FORK}"]]
    text = " ".join(invoke("doctor", registry=registry_with()).stdout.split())
    assert "DeepSeek-V4's attention in vLLM: vLLM serves DeepSeek-V4 here" in text and "fp8_einsum" in text


@pytest.mark.parametrize(
    ("machine", "interface", "words"),
    [
        ("H200", "0.33.0", "vLLM's, with DeepGEMM"),
        ("A100", "0.33.0", "mla_portable's (indexer_select triton.portable"),
        ("MI300X", "0.33.0", "vLLM's: no DeepGEMM on ROCm"),
        ("BI-V150", "0.28.0", "mla_portable's (indexer_select triton.portable"),  # without graphs
        ("BI-V150", "0.17.1", "vLLM's: mla_portable's needs what this vLLM lacks, vllm.model_executor"),
        ("A100", "0.17.1", "vLLM's: mla_portable's needs what this vLLM lacks, vllm.model_executor"),
    ],
)
@pytest.mark.parametrize("version", ["0.17.1+corex.4.4.0", "0.23.0+corex.5.0.0", "0.33.0", "0.1.dev1+g0123456"])
def test_status_tells_whose_indexer_vllm_runs(machine: str, interface: str, words: str, version: str, install: Install):
    """By what vLLM's modules have, as the plugin itself does: a fork or a build from source may say any version."""
    registry = Registry(facts={"cuda": MACHINES[machine]}, environ={}, probe=False)
    install(version, interface)

    def said(**environ: str) -> str:
        return vllm_status(registry, torch.device("cuda"), environ=environ).indexer

    assert said().startswith(words)
    if interface == "0.17.1":
        assert "has_deep_gemm" in said() and said().endswith(f"(it is {version}; 0.24 is the first that has it)")
    asked = said(**{settings.ENV_INDEXER: "on"})
    assert asked.startswith("mla_portable's") == (interface != "0.17.1")


def test_status_tells_what_else_gives_steps_to_the_plugins_indexer(install: Install, tmp_path: Path):
    """Where DeepGEMM serves: VLLM_BATCH_INVARIANT all of them, times of both sides some."""
    install("0.33.0")

    def said(times: str = "", **environ: str) -> str:
        registry = Registry(
            facts={"cuda": MACHINES["H200"]}, environ={"MLA_PORTABLE_TIMES": times} if times else {}, probe=False
        )
        return vllm_status(registry, torch.device("cuda"), environ=environ).indexer

    for value in ("", "0", "1"):
        invariant = said(VLLM_BATCH_INVARIANT=value)
        assert invariant.startswith("mla_portable's") == invariant.endswith(": VLLM_BATCH_INVARIANT is set") == (value == "1")
    assert said(VLLM_BATCH_INVARIANT="1", **{settings.ENV_INDEXER: "off"}).startswith("vLLM's (")
    served = said().partition("indexer_select ")[2].partition(";")[0]
    sizes = {
        "primitive": "indexer_select",
        "layout": "index_fp8",
        "heads": 64,
        "topk": 2048,
        "form": "4096 keys",
        "us": {"1": 9},
    }
    document = {"device": "NVIDIA H200", "recorded": "2026-11-30", "times": [{"implementation": served, **sizes}]}
    folder = tmp_path / "times"
    folder.mkdir()
    file = folder / "indexer.json"
    file.write_text(json.dumps(document))
    assert "less time" not in said() and "less time" not in said(str(folder))  # of one side
    document["baselines"] = [{"implementation": settings.INDEXER_IN_TIMES, **sizes}]
    file.write_text(json.dumps(document))
    divided = said(str(folder))
    assert divided.startswith("vLLM's, with DeepGEMM")
    assert f"in decodes mla_portable's where it takes less time ({served} and vllm.indexer, measured 2026-11-30" in divided


def test_what_has_no_source_is_not_judged(install: Install, tmp_path: Path):
    registry = Registry(facts={"cuda": MACHINES["A100"]}, environ={}, probe=False)
    install("0.33.0", "0.17.1")
    for name in ("model_executor/layers/sparse_attn_indexer", "v1/attention/backends/mla/indexer"):
        (tmp_path / "vllm" / f"{name}.py").rename(tmp_path / "vllm" / f"{name}.cpython-311.so")
    assert vllm_status(registry, torch.device("cuda"), environ={}).indexer.startswith("mla_portable's")


def test_status_tells_whose_layer_stands_around_attention(monkeypatch: pytest.MonkeyPatch, install: Install):
    registry = Registry(environ={"MLA_PORTABLE_BACKEND": "reference"}, probe=False)

    def said(mode: str = "on") -> str:
        return vllm_status(registry, torch.device("cpu"), environ={settings.ENV_LAYER: mode}).layer

    install("0.33.0")
    assert said("") == said("auto") == f"vLLM's: {settings.ENV_LAYER}=auto: no times on record of both layers"
    assert said("off") == f"vLLM's: {settings.ENV_LAYER}=off"
    ours = "mla_portable's (norm_rope_write reference.torch, rope_quantize_queries reference.torch) where a model has"
    assert said().startswith(ours) and not said().endswith(layer_choice.FUSED)
    monkeypatch.setattr("mla_portable.engines.vllm.status._capability", lambda facts: (9, 0))
    assert said().endswith(f"; {layer_choice.FUSED}")


@pytest.mark.parametrize(
    ("interface", "words"),
    [
        ("0.33.0", "nothing here serves norm_rope_write"),
        ("0.17.1", "this vLLM lacks vllm.compilation.breakable_cudagraph"),
    ],
)
def test_status_tells_why_a_layer_that_is_asked_for_cannot_be(interface: str, words: str, install: Install):
    install("0.33.0", interface)
    here = replace(MACHINES["H200"], graph_capture=True)  # which the reference is not for
    registry = Registry(facts={"cuda": here}, environ={"MLA_PORTABLE_BACKEND": "reference"}, probe=False)
    status = vllm_status(registry, torch.device("cuda"), environ={settings.ENV_LAYER: "on"})
    assert status.layer.startswith(f"vLLM's: {words}")


def test_doctor_prints_whose_layer_it_is(install: Install):
    install("0.33.0")
    text = " ".join(invoke("doctor", registry=registry_with()).stdout.split())
    assert f"Layer around attention in vLLM: vLLM's: {settings.ENV_LAYER}=auto" in text
