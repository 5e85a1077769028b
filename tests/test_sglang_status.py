# SPDX-License-Identifier: Apache-2.0
"""What `doctor` says about the SGLang plugin: from the sources of an SGLang, which is not imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import invoke
from machines import A100, CPU, H200
from recorder import Recorder, registry_of

from mla_portable.contracts import DeviceFacts, EngineStatus
from mla_portable.engines.sglang.status import sglang_status

pytestmark = pytest.mark.usefixtures("a_bare_machine")

SGLANG = {
    "sglang/__init__.py": "raise ImportError('doctor reads sources')\n",
    "sglang/srt/layers/attention/dsa/utils.py": """
def resolve_num_sms(): ...
def resolve_paged_mqa_logits_metadata_fn(): ...
def resolve_fp8_paged_mqa_logits_fn(): ...
def resolve_fp8_mqa_logits_fn(): ...
""",
    "sglang/srt/layers/attention/dsa_backend.py": """
class DeepseekSparseAttnBackend:
    def __init__(self, model_runner): ...
    def init_forward_metadata(self, forward_batch): ...
    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False): ...
    def _compute_flashmla_metadata(self, cache_seqlens, seq_len_q): ...
    def _forward_flashmla_kv(self, q_all, kv_cache, v_head_dim, sm_scale, layer, metadata, page_table_1): ...
    def _forward_flashmla_sparse(self, q_all, kv_cache, v_head_dim, page_table_1, sm_scale): ...
    def _forward_fa3(self, q_rope, kv_cache, v_head_dim, q_nope, page_table, cache_seqlens, cu_seqlens_q, cu_seqlens_k,
                     max_seqlen_q, sm_scale, logit_cap, page_size): ...
    def get_indexer_metadata(self, layer_id, forward_batch): ...
""",
    "sglang/srt/models/deepseek_common/attention_forward_methods/forward_mla.py": """
class DeepseekMLAForwardMixin:
    def forward_absorb_prepare(self, positions, hidden_states, forward_batch, zero_allocator, prev_topk_indices=None): ...
    def forward_absorb_core(self, q_pe, k_pe, q_nope_out, k_nope, forward_batch): ...
""",
}
"""The places that the plugin hooks, as in SGLang 0.5.16 with the selectors of 0.5.23."""


Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put such sources where `import sglang` would find them, with one text replaced by another."""

    def put(old: str = "", new: str = "") -> None:
        for name, text in SGLANG.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace(old, new) if old else text)
        monkeypatch.syspath_prepend(tmp_path)
        version = metadata.version
        monkeypatch.setattr("importlib.metadata.version", lambda name: "0.5.23" if name == "sglang" else version(name))
        point = SimpleNamespace(name="mla_portable")
        monkeypatch.setattr("mla_portable.engines.common.status.metadata.entry_points", lambda group: [point])

    return put


def status(facts: DeviceFacts = A100, **environ: str) -> EngineStatus:
    return sglang_status(registry_of(Recorder(), facts={"cpu": facts}), torch.device("cpu"), environ=environ)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("page_table_1, sm_scale)", "page_table_1, sm_scale, causal=True)", "_forward_flashmla_sparse has an unknown causal"),
        ("def _forward_fa3", "def _forward_fa4", "_forward_fa3 is not there"),
        ("cache_seqlens, seq_len_q", "cache_seqlens", "_compute_flashmla_metadata has no seq_len_q"),
        ("class Deepseek", "class Other", "DeepseekSparseAttnBackend.__init__ is not there"),
    ],
    ids=["a new parameter", "a method gone", "a parameter gone", "the class gone"],
)
def test_what_sglang_changed_is_named(install: Install, old: str, new: str, words: str):
    install(old, new)
    found = status()
    assert not found.registered and words in found.note and not found.choices


def test_what_would_serve(install: Install):
    install()
    found = status()
    assert found.registered and found.version == "0.5.23" and "do not support the device" in found.note
    assert {(c.kv_layout, c.num_heads, c.route) for c in found.choices} == {
        (layout, heads, "direct") for layout in ("fp8_ds_mla", "bf16") for heads in (16, 128)
    }
    assert all(c.served_by == "sparse_decode recorder.tape, sparse_prefill recorder.tape" for c in found.choices)
    assert "DeepGEMM does not support sm80" in found.indexer and "indexer_logits_ragged recorder.tape" in found.indexer
    assert status(CPU).indexer == "not known on a CPU; ask on the device that serves"
    assert "scored by DeepGEMM for sm90" in status(H200).indexer
    assert status(H200, MLA_PORTABLE_SGLANG_INDEXER="on").indexer.endswith("MLA_PORTABLE_SGLANG_INDEXER=on")
    assert found.as_dict()["choices"][0]["kv_layout"] == "fp8_ds_mla"


def test_obstacles_are_named(install: Install, monkeypatch: pytest.MonkeyPatch):
    install()
    assert status(MLA_PORTABLE_SGLANG="off").note == "MLA_PORTABLE_SGLANG=off"
    assert "SGLANG_PLUGINS=other leaves 'mla_portable' out" in status(SGLANG_PLUGINS="other").note
    assert status(SGLANG_PLUGINS="other, mla_portable").registered and status(SGLANG_PLUGINS="").registered
    bad = status(MLA_PORTABLE_SGLANG="override")
    assert not bad.registered and "got 'override', expected one of auto, on, off" in bad.note
    monkeypatch.setattr("mla_portable.engines.common.status.metadata.entry_points", lambda group: [])
    assert "no entry point 'mla_portable' in the group sglang.srt.plugins" in status().note


def test_without_sglang(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    found = status()
    assert found.version is None and not found.registered


def test_doctor_says_it(install: Install):
    install("page_table_1, sm_scale)", "page_table_1, sm_scale, causal=True)")
    shown = " ".join(invoke("doctor").stdout.split())
    assert "SGLang 0.5.23: plugin NOT registered" in shown and "has an unknown causal" in shown
    assert "sglang" not in sys.modules
