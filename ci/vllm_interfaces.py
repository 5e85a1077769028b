#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Read from a vLLM wheel, without importing it, the names and parameters that the plugin is written against.

    pip download --no-deps vllm==0.26.0
    ci/vllm_interfaces.py vllm-0.26.0-*.whl        # writes tests/vllm/interfaces/0.26.0.json

What a file holds: per class its methods, which are abstract, their parameters (a trailing "=" marks a default), its bases
and class variables; the fields of the common metadata; which optional functions are there; what MLAAttention and the layers
around it read from an implementation and from the metadata; which of the plugin's own imports from vLLM would succeed.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / "tests" / "vllm" / "interfaces"
PLUGIN = ROOT / "mla_portable" / "vllm"
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
}
FUNCTIONS = {
    "vllm/v1/worker/workspace.py": ("is_workspace_manager_initialized", "current_workspace_manager"),
    "vllm/v1/attention/backends/registry.py": ("register_backend",),
    "vllm/v1/attention/backends/mla/sparse_utils.py": ("align_blocks_to_rows",),
    "vllm/v1/attention/ops/flashmla.py": ("is_flashmla_sparse_supported",),
    "vllm/config/vllm.py": ("get_current_vllm_config_or_none",),
    "vllm/_custom_ops.py": ("concat_and_cache_mla",),
}
LAYER = "vllm/model_executor/layers/attention/mla_attention.py"
CALLERS = {"vllm/model_executor/layers/mla.py": "self.mla_attn.impl", "vllm/models/deepseek_v32/attention.py": "self.impl"}
"""Models' own layers around MLAAttention, and how they name its implementation."""


def parameters(node: ast.FunctionDef) -> list[str]:
    """Names in order; "name=" has a default, "*name" and "**name" collect the rest."""
    plain = [*node.args.posonlyargs, *node.args.args]
    first_default = len(plain) - len(node.args.defaults)
    found = [arg.arg + ("=" if i >= first_default else "") for i, arg in enumerate(plain)]
    if node.args.vararg:
        found.append(f"*{node.args.vararg.arg}")
    pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    found += [arg.arg + ("=" if default is not None else "") for arg, default in pairs]
    if node.args.kwarg:
        found.append(f"**{node.args.kwarg.arg}")
    return found


def describe_class(node: ast.ClassDef) -> dict[str, object]:
    methods = {n.name: parameters(n) for n in node.body if isinstance(n, ast.FunctionDef)}
    abstract = [
        n.name
        for n in node.body
        if isinstance(n, ast.FunctionDef) and any("abstractmethod" in ast.unparse(d) for d in n.decorator_list)
    ]
    names = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
    names += [t.id for n in node.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)]
    bases = [ast.unparse(base).partition("[")[0] for base in node.bases]
    return {"bases": bases, "abstract": abstract, "methods": methods, "variables": names}


def attributes_of(tree: ast.AST, owner: str) -> list[str]:
    """Names N in expressions `owner`.N."""
    return sorted({n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == owner})


def plugin_imports() -> list[tuple[str, str]]:
    """(module, name) of every `from vllm... import name` in the plugin."""
    found: set[tuple[str, str]] = set()
    for path in PLUGIN.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                found |= {(node.module or "", alias.name) for alias in node.names}
    return sorted(found)


def defines(archive: zipfile.ZipFile, present: set[str], module: str, name: str) -> bool:
    """`from module import name` would find something."""
    path = module.replace(".", "/")
    if f"{path}/{name}.py" in present or f"{path}/{name}/__init__.py" in present:
        return True
    for file in (f"{path}.py", f"{path}/__init__.py"):
        if file in present:
            text = archive.read(file).decode()
            return any(name in names_of(node) for node in ast.walk(ast.parse(text))) or f'"{name}"' in text
    return False


def names_of(node: ast.AST) -> set[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return {node.name}
    if isinstance(node, ast.ImportFrom | ast.Import):
        return {alias.asname or alias.name for alias in node.names}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return set()


def extract(wheel: Path) -> dict[str, object]:
    with zipfile.ZipFile(wheel) as archive:
        present = set(archive.namelist())
        trees = {path: ast.parse(archive.read(path)) for path in {*CLASSES, *FUNCTIONS, LAYER, *CALLERS} if path in present}
        imports = {f"{module}:{name}": defines(archive, present, module, name) for module, name in plugin_imports()}
    found: dict[str, object] = {"classes": {}, "functions": {}, "imports": imports}
    for path, names in CLASSES.items():
        body = trees[path].body if path in trees else []
        found["classes"] |= {n.name: describe_class(n) for n in body if isinstance(n, ast.ClassDef) and n.name in names}
    for path, names in FUNCTIONS.items():
        body = trees[path].body if path in trees else []
        functions = {n.name: parameters(n) for n in body if isinstance(n, ast.FunctionDef) and n.name in names}
        found["functions"] |= {f"{path}:{name}": functions.get(name) for name in names}
    layer = next(n for n in trees[LAYER].body if isinstance(n, ast.ClassDef) and n.name == "MLAAttention")
    forward = next(n for n in layer.body if isinstance(n, ast.FunctionDef) and n.name == "forward_impl")
    calls = [n for n in ast.walk(layer) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "impl_cls"]
    callers = [attributes_of(trees[path], name) for path, name in CALLERS.items() if path in trees]
    found["layer"] = {
        "metadata": attributes_of(forward, "attn_metadata"),
        "impl": sorted({*attributes_of(layer, "self.impl"), *(name for names in callers for name in names)}),
        "impl_arguments": sorted({k.arg for call in calls for k in call.keywords if k.arg}),
    }
    return found


def main(wheels: list[str]) -> int:
    if not wheels:
        print(__doc__)
        return 2
    OUT.mkdir(parents=True, exist_ok=True)
    for wheel in map(Path, wheels):
        version = wheel.name.split("-")[1]
        target = OUT / f"{version}.json"
        target.write_text(json.dumps(extract(wheel), indent=1) + "\n")
        print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
