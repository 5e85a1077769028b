# SPDX-License-Identifier: Apache-2.0
"""The table of models: its numbers fit the layouts, and every layer that it describes has a spec."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mla_portable.attention import AttentionSpec
from mla_portable.engines.common.asked import layer_spec, v4_layer_spec
from mla_portable.judge.problems.masked_prefill import DIMS
from mla_portable.layouts import KV, LAYOUTS
from mla_portable.models import DEEPSEEK_V4, DEEPSEEK_V32, GLM_5, GLM_53_FLASH, MODELS, Model

KIT = Path(__file__).parents[1] / "ci" / "vllm_gpu"


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_model_s_layouts_are_of_attention_and_hold_its_rotary_part(model: Model):
    for name in model.layouts:
        layout = LAYOUTS[name]
        assert layout.cache == KV and (model.head_dims[1] == 0 or layout.rope_width in (model.head_dims[1], 0))
    assert model.per_head_prompts or model.qk_head_dim == LAYOUTS[model.layouts[0]].key_width


@pytest.mark.parametrize("model", [DEEPSEEK_V32, GLM_5], ids=lambda model: model.name)
def test_a_layer_asks_for_what_the_model_has(model: Model):
    spec = layer_spec(model, "bf16", 8)
    assert spec == AttentionSpec(8, model.qk_head_dim**-0.5, 8192, 256, model.max_model_len, "bf16", topk=2048, need_lse=False)


def test_a_layer_of_v4_has_two_caches_and_a_sink():
    spec = v4_layer_spec(8)
    assert (spec.topk, spec.extra_topk, spec.attn_sink, spec.softmax_scale) == (128, 512, True, 512**-0.5)
    assert spec.kv_layout in DEEPSEEK_V4.layouts and not spec.concat_query


def test_widths_of_prompts_are_those_of_the_models():
    assert DIMS[:2] == ((192, 128), (256, 256))


@pytest.mark.parametrize("model", [DEEPSEEK_V32, GLM_53_FLASH], ids=lambda model: model.name)
def test_the_kit_s_checkpoints_have_the_models_widths(kit: Any, model: Model):
    """They state them again: the kit's engine imports nothing of this project before a rehearsal has hidden what it hides."""
    make = kit.checkpoint.v32_config if model is DEEPSEEK_V32 else kit.other_models.glm_config
    config = make(16)
    dims = tuple(config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    assert (dims, config["index_n_heads"], config["index_topk"]) == (model.head_dims, model.index_heads, model.topk)


def test_the_kit_imports_nothing_of_this_project_before_a_rehearsal():
    code = (
        "import sys; sys.path.insert(0, 'ci/vllm_gpu'); import checkpoint, other_models; print('mla_portable' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=KIT)
    assert done.stdout.strip() == "False"


def test_the_table_needs_no_torch():
    code = "import sys, mla_portable.models; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
