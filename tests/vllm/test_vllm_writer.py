# SPDX-License-Identifier: Apache-2.0
"""Who writes the cache, with which scales, and what readers may rely on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm_engine import CPU, make_engine

from mla_portable.contracts import InvalidArgument
from mla_portable.engines.vllm import settings
from mla_portable.engines.vllm import writer as writer_module
from mla_portable.engines.vllm.writer import Trial, Writer


def fake_operator(scale: float, *, spoil: bool = False):
    """vLLM's writer as versions differ: scales of `scale` for groups of 256."""

    def concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale):
        row = kv_cache.view(-1, kv_cache.shape[-1])[slot_mapping[0]]
        if kv_cache_dtype == "auto":
            row[:] = torch.cat([kv_c[0], k_pe[0]]) * (2 if spoil else 1)
            return
        row[:512] = (kv_c[0].float() / its_scale).to(torch.float8_e4m3fn).view(torch.uint8)
        row[512:528] = torch.full((4,), its_scale * (2 if spoil else 1), dtype=torch.float32).view(torch.uint8)
        row[528:] = k_pe[0].view(torch.uint8)

    its_scale = scale
    return SimpleNamespace(concat_and_cache_mla=concat_and_cache_mla)


@pytest.mark.parametrize("scale, found", [(256 / 448, "amax"), (1.0, "pow2")])
def test_the_scales_that_vllm_writes_are_found_out(scale: float, found: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writer_module, "import_module", lambda name: fake_operator(scale))
    trial = writer_module.try_vllm.__wrapped__
    assert trial("fp8_ds_mla", CPU) == Trial(True, found)
    assert trial("bf16", CPU) == Trial(True)
    monkeypatch.setattr(writer_module, "import_module", lambda name: fake_operator(scale, spoil=True))
    assert not trial("fp8_ds_mla", CPU).works
    assert not trial("bf16", CPU).works


@pytest.mark.parametrize(
    "demand, trial, connector, expected",
    [
        ("auto", Trial(True, "amax"), False, Writer("vllm", "amax")),
        ("auto", Trial(True, "pow2"), True, Writer("vllm", "pow2")),
        ("auto", Trial(True, "amax"), True, Writer("vllm", "amax")),
        ("auto", Trial(False), True, Writer("mla_portable", None)),
        ("auto", Trial(False), False, Writer("mla_portable", "pow2")),
        ("mla_portable", Trial(True, "pow2"), False, Writer("mla_portable", "pow2")),
        ("mla_portable", Trial(True, "amax"), False, Writer("mla_portable", None)),
    ],
)
def test_who_writes_and_what_readers_may_rely_on(demand, trial, connector, expected, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(settings.ENV_WRITER, demand)
    monkeypatch.setattr(writer_module, "try_vllm", lambda layout, device, *, nope: trial)
    config = SimpleNamespace(kv_transfer_config=object() if connector else None)
    assert writer_module.choose_writer("fp8_ds_mla", CPU, config) == expected
    assert writer_module.choose_writer("bf16", CPU, config) == Writer(expected.who, None)


@pytest.mark.parametrize("writer", ["auto", "mla_portable"])
@pytest.mark.parametrize("made", ["pow2", "amax"])
@pytest.mark.parametrize("stated", ["pow2", "amax"])
def test_scales_of_received_rows_may_be_stated(stated: str, made: str, writer: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(settings.ENV_WRITER, writer)
    monkeypatch.setenv(settings.ENV_SCALES, stated)
    monkeypatch.setattr(writer_module, "try_vllm", lambda layout, device, *, nope: Trial(True, made))
    config = SimpleNamespace(kv_transfer_config=object())
    if stated == made:
        who = "vllm" if writer == "auto" else "mla_portable"
        assert writer_module.choose_writer("fp8_ds_mla", CPU, config) == Writer(who, stated)
        return
    with pytest.raises(InvalidArgument, match=f"CACHE_SCALES: got '{stated}', expected .*{made}.*mixed reads each scale"):
        writer_module.choose_writer("fp8_ds_mla", CPU, config)


@pytest.mark.parametrize("trial", [Trial(True, "pow2"), Trial(False)])
def test_rows_of_several_kinds_may_be_stated(trial: Trial, monkeypatch: pytest.MonkeyPatch):
    """As with nodes of two versions, or rows that an older version left in a store."""
    monkeypatch.setenv(settings.ENV_SCALES, "mixed")
    monkeypatch.setattr(writer_module, "try_vllm", lambda layout, device, *, nope: trial)
    assert writer_module.choose_writer("fp8_ds_mla", CPU, None).scale_format is None
    assert make_engine("fp8").builder.attention.spec.scale_format is None


def test_stated_scales_are_those_that_the_primitive_writes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(settings.ENV_SCALES, "amax")
    monkeypatch.setattr(writer_module, "try_vllm", lambda layout, device, *, nope: Trial(False))
    assert writer_module.choose_writer("fp8_ds_mla", CPU, None) == Writer("mla_portable", "amax")
    engine = make_engine("fp8")
    assert engine.builder.attention.spec.scale_format == "amax"


def test_demanding_a_writer_that_does_not_work_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(settings.ENV_WRITER, "vllm")
    with pytest.raises(InvalidArgument, match="vLLM's operator does not write fp8_ds_mla on cpu"):
        writer_module.choose_writer("fp8_ds_mla", CPU, None)
