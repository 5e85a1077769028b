#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Read from a vLLM wheel, without importing it, the names and parameters that the plugin is written against.

    pip download --no-deps vllm==0.26.0
    ci/vllm_interfaces.py vllm-0.26.0-*.whl        # writes tests/vllm/interfaces/0.26.0.json

What a file holds, as words in a string: per class its methods with their parameters (a trailing "=" marks a default), which
are abstract, its bases and class variables; the fields of the common metadata; which optional functions are there; what
MLAAttention and the layers around it read from an implementation and from the metadata; which of the plugin's own imports
from vLLM would succeed; which names the plugin's replacements of the DSA indexer would find, and how vLLM calls DeepGEMM there;
the attributes of the classes that the plugin's layer around attention reads.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUT = ROOT / "tests" / "vllm" / "interfaces"
PLUGIN = ROOT / "mla_portable" / "engines" / "vllm"
CLASSES = {
    "vllm/v1/attention/backend.py": (
        "AttentionBackend",
        "AttentionMetadataBuilder",
        "AttentionImplBase",
        "MLAAttentionImpl",
        "SparseMLAAttentionImpl",
        "CommonAttentionMetadata",
    ),
    "vllm/v1/attention/backends/registry.py": ("AttentionBackendEnum",),
    "vllm/v1/worker/workspace.py": ("WorkspaceManager",),
    "vllm/model_executor/layers/sparse_attn_indexer.py": ("SparseAttnIndexer",),
    "vllm/v1/attention/backends/mla/indexer.py": ("DeepseekV32IndexerMetadata", "DeepseekV32IndexerMetadataBuilder"),
    "vllm/model_executor/layers/mla.py": ("MultiHeadLatentAttentionWrapper",),
}
FUNCTIONS = {
    "vllm/v1/worker/workspace.py": ("is_workspace_manager_initialized", "current_workspace_manager"),
    "vllm/v1/attention/backends/registry.py": ("register_backend",),
    "vllm/v1/attention/backends/mla/sparse_utils.py": ("align_blocks_to_rows",),
    "vllm/v1/attention/ops/flashmla.py": ("is_flashmla_sparse_supported",),
    "vllm/config/vllm.py": ("get_current_vllm_config_or_none",),
    "vllm/_custom_ops.py": ("concat_and_cache_mla", "indexer_k_quant_and_cache"),
    "vllm/model_executor/layers/sparse_attn_indexer.py": ("sparse_attn_indexer",),
}
SEAMS = {
    "vllm/model_executor/layers/sparse_attn_indexer.py": (
        "SparseAttnIndexer",
        "_resolve_layer_name",
        "eager_break_during_capture",
        "has_deep_gemm",
        "sparse_attn_indexer",
    ),
    "vllm/v1/attention/backends/mla/indexer.py": ("DeepseekV32IndexerMetadataBuilder", "has_deep_gemm"),
    "vllm/utils/deep_gemm.py": ("_lazy_init", "mqa_logits_use_mx_scales"),
    "vllm/model_executor/models/deepseek_v2.py": ("DeepseekV3ForCausalLM", "GlmMoeDsaForCausalLM", "Indexer"),
    "vllm/model_executor/models/deepseek_mtp.py": ("DeepSeekMTP",),
    "vllm/models/glm5next/nvidia/sparse_indexer.py": ("SparseAttnIndexerKpool", "has_deep_gemm", "pack_seq_triton"),
    "vllm/model_executor/layers/sparse_attn_indexer_kpool.py": ("SparseAttnIndexerKpool", "has_deep_gemm", "pack_seq_triton"),
    "vllm/models/glm5next/nvidia/ops/kpool_compress.py": (
        "_fwht_quant_kernel",
        "_kpool_softmax_rotate_write_cache_kernel",
        "_kpool_decode_update_batched_kernel",
    ),
    "vllm/models/glm5next/common/attention.py": ("_pad_indexer_heads",),
    "vllm/models/glm5next/nvidia/attention.py": ("_pad_indexer_heads",),
    "vllm/models/deepseek_v32/__init__.py": ("DeepseekV32ForCausalLM", "DeepseekV32MTP", "GlmMoeDsaForCausalLM"),
    "vllm/model_executor/custom_op.py": ("PluggableLayer", "op_registry_oot"),
    "vllm/model_executor/layers/mla.py": ("MultiHeadLatentAttentionWrapper",),
    "vllm/model_executor/layers/attention/attention.py": ("get_attention_context",),
    "vllm/compilation/breakable_cudagraph.py": ("eager_break_during_capture",),
    "vllm/utils/torch_utils.py": ("LayerNameType", "_encode_layer_name", "_resolve_layer_name"),
}
"""Modules of the DSA indexer and of the layer around attention, and names in them that the plugin replaces or uses."""
LAYER = "vllm/model_executor/layers/attention/mla_attention.py"
AROUND = {
    "vllm/model_executor/layers/mla.py": "MultiHeadLatentAttentionWrapper",
    "vllm/model_executor/models/deepseek_v2.py": "Indexer",
    "vllm/model_executor/layers/sparse_attn_indexer.py": "SparseAttnIndexer",
    LAYER: "MLAAttention",
}
"""Classes whose objects the plugin's layer around attention reads: what they have is what they give to `self`."""
DEEP_GEMM = "vllm/utils/deep_gemm.py"
OPERATORS = "vllm/config/compilation.py"
CALLERS = {"vllm/model_executor/layers/mla.py": "self.mla_attn.impl", "vllm/models/deepseek_v32/attention.py": "self.impl"}
"""Models' own layers around MLAAttention, and how they name its implementation."""


def parameters(node: ast.FunctionDef) -> str:
    """Names in order; "name=" has a default, "*name" and "**name" collect the rest."""
    plain = [*node.args.posonlyargs, *node.args.args]
    required = len(plain) - len(node.args.defaults)
    found = [arg.arg + "=" * (at >= required) for at, arg in enumerate(plain)]
    found += [f"*{arg.arg}" for arg in (node.args.vararg,) if arg]
    found += [a.arg + "=" * (d is not None) for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
    found += [f"**{arg.arg}" for arg in (node.args.kwarg,) if arg]
    return " ".join(found)


def describe_class(node: ast.ClassDef) -> dict[str, str | dict[str, str]]:
    methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
    targets = [n.target for n in node.body if isinstance(n, ast.AnnAssign)]
    targets += [target for n in node.body if isinstance(n, ast.Assign) for target in n.targets]
    return {
        "bases": " ".join(ast.unparse(base).partition("[")[0] for base in node.bases),
        "abstract": " ".join(n.name for n in methods if any("abstractmethod" in ast.unparse(d) for d in n.decorator_list)),
        "methods": {n.name: parameters(n) for n in methods},
        "variables": " ".join(target.id for target in targets if isinstance(target, ast.Name)),
    }


def attributes_of(tree: ast.AST, owner: str) -> set[str]:
    """Names N in expressions `owner`.N."""
    return {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == owner}


def plugin_imports() -> list[tuple[str, str]]:
    """(module, name) of every `from vllm... import name` in the plugin."""
    nodes = [node for path in PLUGIN.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    imports = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module and n.module.split(".")[0] == "vllm"]
    return sorted({(node.module, alias.name) for node in imports for alias in node.names})


def defines(archive: zipfile.ZipFile, present: set[str], module: str, name: str) -> bool:
    """`from module import name` would find something: a module, or a name that the module binds or quotes."""
    path = module.replace(".", "/")
    if not present.isdisjoint((f"{path}/{name}.py", f"{path}/{name}/__init__.py")):
        return True
    texts = [archive.read(file).decode() for file in (f"{path}.py", f"{path}/__init__.py") if file in present]
    return any(f'"{name}"' in text or name in bound_names(ast.parse(text)) for text in texts)


def bound_names(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def deep_gemm_calls(tree: ast.AST) -> dict[str, str]:
    """DeepGEMM's indexer functions -> how vLLM's wrappers call them: arguments by position, then "name=" and "**name"."""
    calls = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and ast.unparse(n.func).endswith(("_logits_impl", "_metadata_impl"))
    ]
    return {
        ast.unparse(call.func).removeprefix("_").removesuffix("_impl"): " ".join(
            [ast.unparse(each) for each in call.args]
            + [f"{k.arg}=" if k.arg else f"**{ast.unparse(k.value)}" for k in call.keywords]
        )
        for call in calls
    }


def defined(tree: ast.AST, kind: type) -> dict[str, Any]:
    """Name -> classes or functions of a module or a class."""
    return {node.name: node for node in tree.body if isinstance(node, kind)}


def extract(wheel: Path) -> dict[str, Any]:
    with zipfile.ZipFile(wheel) as archive:
        present, paths = set(archive.namelist()), {*CLASSES, *FUNCTIONS, *SEAMS, *AROUND, *CALLERS, OPERATORS}
        trees = {path: ast.parse(archive.read(path) if path in present else "") for path in paths}
        imports = {f"{module}:{name}": defines(archive, present, module, name) for module, name in plugin_imports()}
    found: dict[str, Any] = {"classes": {}, "functions": {}, "imports": imports}
    for path, names in CLASSES.items():
        classes = defined(trees[path], ast.ClassDef).items()
        found["classes"] |= {name: describe_class(node) for name, node in classes if name in names}
    for path, names in FUNCTIONS.items():
        functions = {name: parameters(node) for name, node in defined(trees[path], ast.FunctionDef).items()}
        found["functions"] |= {f"{path}:{name}": functions.get(name) for name in names}
    layer = defined(trees[LAYER], ast.ClassDef)["MLAAttention"]
    forward = defined(layer, ast.FunctionDef)["forward_impl"]
    calls = [n for n in ast.walk(layer) if isinstance(n, ast.Call) and ast.unparse(n.func) == "impl_cls"]
    read = [attributes_of(trees[path], name) for path, name in CALLERS.items()]
    names = {
        "metadata": attributes_of(forward, "attn_metadata"),
        "impl": attributes_of(layer, "self.impl").union(*read),
        "impl_arguments": {keyword.arg for call in calls for keyword in call.keywords if keyword.arg},
    }
    found["seams"] = {path: " ".join(sorted(bound_names(trees[path]).intersection(some))) for path, some in SEAMS.items()}
    around = ((name, defined(trees[path], ast.ClassDef).get(name)) for path, name in AROUND.items())
    found["around"] = {name: " ".join(sorted(attributes_of(node, "self"))) for name, node in around if node is not None}
    found["deep_gemm"] = deep_gemm_calls(trees[DEEP_GEMM])
    found["splits_at_the_indexer"] = '"vllm::sparse_attn_indexer"' in ast.unparse(trees[OPERATORS]).replace("'", '"')
    return {**found, "layer": {what: " ".join(sorted(several)) for what, several in names.items()}}


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    for wheel in map(Path, sys.argv[1:]):
        target = OUT / f"{wheel.name.split('-')[1]}.json"
        target.write_text(json.dumps(extract(wheel), indent=1) + "\n")
        print(target)
