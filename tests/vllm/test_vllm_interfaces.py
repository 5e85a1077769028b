# SPDX-License-Identifier: Apache-2.0
"""The plugin against the interfaces of other versions of vLLM, as `ci/vllm_interfaces.py` read them from the wheels.

interfaces/*.json hold names and parameters only. The installed version is among them and is checked against its own file,
so that what the program reads is known to be what Python sees.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import shadow
from vllm.v1.attention import backend as stock
from vllm_engine import make_config

from mla_portable import deep_gemm
from mla_portable.engines.vllm import compat, indexer_seams, layer_choice
from mla_portable.engines.vllm.backend import MLAPortableBackend
from mla_portable.engines.vllm.builder import MLAPortableMetadataBuilder
from mla_portable.engines.vllm.impl import READS, MLAPortableImpl
from mla_portable.engines.vllm.metadata import MLAPortableMetadata

FILES = {path.stem: path for path in sorted((Path(__file__).parent / "interfaces").glob("*.json"))}
OPTIONAL = {
    "vllm.v1.attention.backends.mla.sparse_utils:align_blocks_to_rows",
    "vllm.transformers_utils.deepseek_v4_utils:get_compress_ratios",
}
NOT_REACHED = {
    "_w_scale": "packed weights of CPU platforms",
    "_w_uk_packed": "packed weights of CPU platforms",
    "_w_uv_packed": "packed weights of CPU platforms",
    "pcp_world_size": "made by AttentionImplBase.__new__",
    "dcp_world_size": "made by AttentionImplBase.__new__",
}


@pytest.fixture(params=FILES)
def interface(request: pytest.FixtureRequest) -> dict[str, Any]:
    return json.loads(FILES[request.param].read_text())


def bases(interface: dict[str, Any], name: str) -> list[str]:
    """The class and those above it, as far as they were read."""
    classes = interface["classes"]
    return [name, *(b for base in classes[name]["bases"].split() if base in classes for b in bases(interface, base))]


def impl_base(interface: dict[str, Any]) -> str:
    return "SparseMLAAttentionImpl" if "SparseMLAAttentionImpl" in interface["classes"] else "MLAAttentionImpl"


def pairs(interface: dict[str, Any]) -> list[tuple[type, str]]:
    return [
        (MLAPortableBackend, "AttentionBackend"),
        (MLAPortableMetadataBuilder, "AttentionMetadataBuilder"),
        (MLAPortableImpl, impl_base(interface)),
    ]


def test_the_versions_that_are_promised_are_there():
    assert set(FILES) == {"0.17.1", "0.28.0", "0.30.0", "0.33.0"}


def test_every_abstract_method_is_ours(interface: dict[str, Any]):
    for ours, name in pairs(interface):
        wanted = {method for base in bases(interface, name) for method in interface["classes"][base]["abstract"].split()}
        missing = {
            method for method in wanted if not any(method in vars(c) for c in ours.__mro__ if "mla_portable" in c.__module__)
        }
        assert not missing, f"{ours.__name__} lacks {missing}"


def test_what_vllm_may_pass_is_accepted(interface: dict[str, Any]):
    checked = 0
    for ours, name in pairs(interface):
        for base in bases(interface, name):
            for method, parameters in interface["classes"][base]["methods"].items():
                if method not in vars(ours) or isinstance(vars(ours)[method], property):
                    continue
                signature = inspect.signature(inspect.unwrap(getattr(vars(ours)[method], "__func__", vars(ours)[method])))
                arguments = [p.rstrip("=") for p in parameters.split() if not p.startswith("*")]
                signature.bind(**dict.fromkeys(arguments))  # by name
                if method != "__init__":  # an implementation is only ever made with names
                    signature.bind(*arguments)
                    order = [p for p in signature.parameters if p in arguments]
                    assert order == arguments[: len(order)], f"{ours.__name__}.{method}: {order}, vLLM has {arguments}"
                checked += 1
    assert checked > 12


def test_a_layer_finds_what_it_reads(interface: dict[str, Any]):
    layer = {what: set(names.split()) for what, names in interface["layer"].items()}
    assert layer["metadata"] <= {field.name for field in dataclasses.fields(MLAPortableMetadata)}
    above = interface["classes"]
    inherited: set[str] = set()
    for base in bases(interface, impl_base(interface)):
        inherited |= {*above[base]["methods"], *above[base]["variables"].split()}
    ours = {name for c in MLAPortableImpl.__mro__ if "mla_portable" in c.__module__ for name in vars(c)}
    assert layer["impl"] <= ours | inherited | set(NOT_REACHED)
    assert {*READS, "indexer"} <= layer["impl_arguments"]


def test_what_computes_is_known_and_all_else_is_a_hook(interface: dict[str, Any]):
    """Shadow mode calls hooks on both implementations, and what computes on one."""
    names = {name for base in bases(interface, impl_base(interface)) for name in interface["classes"][base]["methods"]}
    hooks = {"prepare_for_batch", "process_weights_after_loading", "record_logical_topk_ready", "reserve_workspace"}
    assert {name for name in names if not name.startswith("_")} - shadow.COMPUTING <= hooks


def test_what_selection_is_asked_with_is_all_that_it_needs(interface: dict[str, Any]):
    parameters = interface["classes"]["AttentionBackend"]["methods"]["validate_configuration"].split()
    config = make_config()
    needed = {name for name in parameters if not name.endswith("=")} - {"cls"}
    assert needed <= set(compat.selection_arguments(config))


def test_lengths_on_the_host_have_a_name_we_know(interface: dict[str, Any]):
    fields = interface["classes"]["CommonAttentionMetadata"]["variables"].split()
    assert {"seq_lens_cpu_upper_bound", "_seq_lens_cpu"} & set(fields)
    used = {"query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "num_actual_tokens", "max_query_len"}
    assert used | {"max_seq_len", "block_table_tensor", "slot_mapping"} <= set(fields)


def test_imports_would_succeed(interface: dict[str, Any]):
    missing = {name for name, found in interface["imports"].items() if not found}
    around = {f"{module}:{name}" for module, names in layer_choice.NEEDS.items() for name in names}  # looked for beforehand
    assert missing <= OPTIONAL | around and not (missing & around and interface in with_layer())
    assert len(interface["imports"]) >= 10
    needed = {name for name, parameters in interface["functions"].items() if parameters is None}
    assert needed <= {"vllm/v1/attention/backends/mla/sparse_utils.py:align_blocks_to_rows"}


def with_layer() -> list[dict[str, Any]]:
    """Of the versions whose layer around attention ours can take the place of: from 0.26 on."""
    names = [name for name in FILES if tuple(map(int, name.split("."))) >= (0, 26)]
    return [json.loads(FILES[name].read_text()) for name in names]


READ_AROUND = {
    "MultiHeadLatentAttentionWrapper": (
        *("fused_qkv_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_layernorm", "rotary_emb", "o_proj", "mla_attn", "skip_topk"),
        *("indexer", "indexer_rope_emb", "is_sparse", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_head_dim"),
        *("num_heads", "v_head_dim"),
    ),
    "Indexer": (
        *("wq_b", "wk_weights_proj", "k_norm", "k_cache", "indexer_op"),
        *("head_dim", "n_head", "softmax_scale", "scale_fmt"),
    ),
    "SparseAttnIndexer": ("skip_k_cache_insert",),
    "MLAAttention": ("layer_name", "kv_cache", "impl", "W_UK_T", "qk_nope_head_dim", "kv_lora_rank", "_v_up_proj"),
}
"""What our layer reads of vLLM's objects, by class."""


def test_what_our_layer_reads_is_there():
    found = with_layer()
    assert len(found) == 3
    for interface in found:
        for module, names in layer_choice.NEEDS.items():
            assert set(names) <= set(interface["seams"][f"{module.replace('.', '/')}.py"].split()), module
        for name, attributes in READ_AROUND.items():
            assert set(attributes) <= set(interface["around"][name].split()), name
        called = interface["classes"]["MultiHeadLatentAttentionWrapper"]["methods"]["forward"].split()
        assert called == ["self", "positions", "hidden_states", "llama_4_scaling="]
        forward = interface["classes"]["SparseAttnIndexer"]["methods"]["forward_cuda"].split()
        assert forward[:2] == ["self", "hidden_states"] and forward[3:] == ["k", "weights"]


def test_where_the_models_for_cuda_have_a_layer_of_their_own():
    path, names = layer_choice.OWN_LAYER
    own = [set(names) <= set(each["seams"][f"{path.replace('.', '/')}.py"].split()) for each in with_layer()]
    assert own == [False, True, True]  # 0.28 has generic models on every device


WITH_INDEXER = [name for name in FILES if tuple(map(int, name.split("."))) >= (0, 24)]
OPERATOR = "vllm/model_executor/layers/sparse_attn_indexer.py:sparse_attn_indexer"
READ_BY_OURS = {
    "hidden_states",
    "k_cache_prefix",
    "kv_cache",
    "q_quant",
    "k",
    "weights",
    "scale_fmt",
    "topk_tokens",
    "topk_indices_buffer",
    "skip_k_cache_insert",
}
NOT_IN_ALL = {
    "use_fp4_cache",
    "dcp_world_size",
    "use_pcp",
    "candidate_blocks",
    "skip_topk_buffer_clear",
    "dense_mha_metadata_layer_name",
}
WITHOUT_MEANING_FOR_OURS = {
    "q_scale": "FP4 alone",
    "quant_block_size": "128, the width of a key",
    "head_dim": "of q",
    "max_model_len": "the width of the logits matrix",
    "total_seq_lens": "the rows of gathered keys",
    "dcp_rank": "context parallelism",
    "cp_kv_cache_interleave_size": "context parallelism",
    "pcp_shard_decode_requests": "context parallelism",
    "candidate_block_size": "two-level selection",
    "candidate_write": "two-level selection",
    "topk_backend": "vLLM's own top-k",
}


def test_every_version_that_is_promised_has_its_indexer_read():
    assert set(WITH_INDEXER) == {"0.28.0", "0.30.0", "0.33.0"}


@pytest.fixture(params=WITH_INDEXER)
def with_indexer(request: pytest.FixtureRequest) -> dict[str, Any]:
    return json.loads(FILES[request.param].read_text())


def test_what_is_replaced_of_the_indexer_is_there(with_indexer: dict[str, Any]):
    pools: list[str] = []
    for module, seam in indexer_seams.SEAMS.items():
        path = module.replace(".", "/")
        found = [names for at, names in with_indexer["seams"].items() if at in (f"{path}.py", f"{path}/__init__.py")]
        assert len(found) == 1, module
        if seam.change in (indexer_seams.serve_pools, indexer_seams.store_pools, indexer_seams.pad_heads_as_bytes):
            pools += [seam.change.__name__ for names in found if names]
            found = found if found[0] else [" ".join(seam.needs)]
        assert set(seam.needs) <= set(found[0].split()), module
    older = json.loads(FILES["0.28.0"].read_text())
    wanted = ["pad_heads_as_bytes", "serve_pools", "store_pools"]  # of pooled keys, from 0.30 on, two in modules that moved
    assert sorted(pools) == (wanted if with_indexer != older else [])
    assert "_lazy_init" in with_indexer["seams"]["vllm/utils/deep_gemm.py"].split()
    models = with_indexer["seams"]["vllm/models/deepseek_v32/__init__.py"].split()
    for name, (path, generic) in indexer_seams._MODELS.items():
        assert name not in models or generic in with_indexer["seams"][f"{path.replace('.', '/')}.py"].split()
    builder = with_indexer["classes"]["DeepseekV32IndexerMetadataBuilder"]["methods"]
    assert builder["build"].split() == ["self", "common_prefix_len", "common_attn_metadata", "fast_build="]
    assert "get_cudagraph_support" in builder
    metadata = with_indexer["classes"]["DeepseekV32IndexerMetadata"]["variables"].split()
    assert {"slot_mapping", "num_decodes", "num_decode_tokens"} <= set(metadata)
    written = with_indexer["functions"]["vllm/_custom_ops.py:indexer_k_quant_and_cache"].split()
    assert written[:4] == ["k", "kv_cache", "slot_mapping", "quant_block_size"] and len(written) == 5
    assert with_indexer["splits_at_the_indexer"]


def test_every_argument_of_the_operator_has_a_meaning(with_indexer: dict[str, Any]):
    arguments = {name.rstrip("=") for name in with_indexer["functions"][OPERATOR].split()}
    assert arguments >= READ_BY_OURS
    assert arguments <= READ_BY_OURS | NOT_IN_ALL | set(WITHOUT_MEANING_FOR_OURS)


def test_deep_gemm_is_called_in_a_way_that_ours_takes(with_indexer: dict[str, Any]):
    assert set(with_indexer["deep_gemm"]) >= {
        "fp8_fp4_mqa_logits",
        "fp8_fp4_paged_mqa_logits",
        "get_paged_mqa_logits_metadata",
    }
    for name, call in with_indexer["deep_gemm"].items():
        if not hasattr(deep_gemm, name):
            assert "sparse" in name  # two-level selection
            continue
        words = call.split()
        given = [word for word in words if not word.endswith("=") and not word.startswith("**")]
        named = {word.rstrip("="): None for word in words if word.endswith("=")}
        if "**kwargs" in words:
            named["indices"] = None
        inspect.signature(getattr(deep_gemm, name)).bind(*given, **named)


def test_what_was_read_is_what_python_sees():
    interface = json.loads(FILES[metadata.version("vllm")].read_text())
    for name in ("AttentionBackend", "AttentionMetadataBuilder", "AttentionImplBase", "MLAAttentionImpl"):
        read, real = interface["classes"][name], getattr(stock, name)
        assert set(read["abstract"].split()) <= real.__abstractmethods__
        for method, parameters in read["methods"].items():
            function = inspect.unwrap(inspect.getattr_static(real, method))
            function = getattr(function, "__func__", getattr(function, "fget", function))
            assert [p.rstrip("=").lstrip("*") for p in parameters.split()] == list(inspect.signature(function).parameters)
