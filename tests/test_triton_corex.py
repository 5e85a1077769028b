# SPDX-License-Identifier: Apache-2.0
"""The portable kernels keep to what CoreX's Tritons accept."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import mla_portable_triton
from mla_portable.contracts import DeviceFacts, Request
from mla_portable.primitives import SPARSE_PREFILL

KERNELS = Path(mla_portable_triton.__file__).parent / "kernels"
NEED_TRITON_3 = {
    "index_keys",
    "indexer_logits",
    "indexer_logits_blocks",
    "indexer_logits_ragged",
    "masked_prefill",
    "pack_selection",
    "topk_select",
}
"""Kernels that the plugin offers from Triton 3.0 on alone."""
TAKE_THEMSELVES_OUT = {"e4m3_packed", "early_start", "paired_columns", "rotary"}
"""Helpers that define something else, or nothing, where Triton lacks a name."""
IN_MATH = {"div_rn", "exp2", "log2"}
"""To be written `tl.math.`: `tl` itself has them since Triton 3 only."""
IN_TRITON_2_1 = {
    "abs", "arange", "atomic_add", "atomic_cas", "atomic_max", "atomic_min", "bfloat16", "broadcast_to", "cat", "cdiv",
    "constexpr", "cumsum", "dot", "exp", "expand_dims", "float16", "float32", "full", "int1", "int16", "int32", "int64", "int8",
    "load", "log", "math", "max", "max_contiguous", "maximum", "min", "minimum", "multiple_of", "num_programs", "pointer_type",
    "program_id", "ravel", "reshape", "sqrt", "static_assert", "static_range", "store", "sum", "trans", "uint16", "uint32",
    "uint64", "uint8", "view", "where", "zeros", "zeros_like",
}  # fmt: skip
"""Read from the published wheels of 2.1.0 and 3.1.0. No float64, which is broken on CoreX devices."""
FLOAT8 = {"float8e4nv", "float8e5"}


def breaches(source: str) -> list[str]:
    """What Triton 2.1 would not accept (rules: docs/dev/iluvatar.md).

    A float8 type may stand behind `if ..NATIVE:`. Every other name is looked up, in a branch that is not taken too.
    """
    found: list[str] = []
    tree = ast.parse(source)
    gated = {
        inner
        for gate in (node for node in ast.walk(tree) if isinstance(node, ast.If))
        if ast.unparse(gate.test).endswith("NATIVE")
        for line in gate.body
        for inner in ast.walk(line)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := re.fullmatch(r"tl\.(math\.)?(\w+)", ast.unparse(node))):
            known = IN_MATH if name[1] else IN_TRITON_2_1 | (FLOAT8 if node in gated else set[str]())
            found += [] if name[2] in known else [name[0]]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.dot" and (len(node.args) > 2 or node.keywords):
            found.append("tl.dot with more than two operands")
        elif isinstance(node, ast.Call) and re.match(r"tl\.(full|zeros)\((shape=)?(\[\]|\(\))", ast.unparse(node)):
            found.append("a tensor without an axis")
    return found


PORTABLE = sorted(path for path in KERNELS.glob("*.py") if path.stem not in NEED_TRITON_3 | TAKE_THEMSELVES_OUT)


@pytest.mark.parametrize("path", PORTABLE, ids=lambda path: path.stem)
def test_the_kernels_keep_to_triton_2_1(path: Path):
    assert breaches(path.read_text()) == []


@pytest.mark.parametrize(
    "body",
    [
        "x.to(tl.float64)", "x.to(tl.float8e4nv)", "tl.make_tensor_descriptor(x, [n], [1], [4])", "tl.range(0, n)",
        "tl.exp2(x)", "tl.math.erf(x)", "tl.dot(x, x, y)", "tl.dot(x, x, input_precision='ieee')", "tl.full([], 0, tl.int64)",
        "tl.zeros(shape=(), dtype=tl.int64)",
    ],
)  # fmt: skip
def test_a_breach_is_found(body: str):
    assert len(breaches(body)) == 1
    assert breaches("if E4M3_NATIVE:\n    tl.math.exp2(x.to(tl.float8e4nv))") == []


@pytest.mark.parametrize("arch", ["ivcore10", "ivcore11", "ivcore20", "ivcore30", "ivcore"])
def test_configurations_suit_warps_of_64_and_the_least_dot(arch):
    """Axes of a dot are 16 at least, bytes of shared memory 48 KiB at most where more is not known, threads 1024 at most."""
    from mla_portable_triton.attention_configs import attention_config
    from mla_portable_triton.kernels import (
        cache_write,
        concat_mla_k,
        convert_indices,
        gather_upconvert,
        indexer_cache_write,
        indexer_logits,
        norm_rope_write,
        quantize_per_tensor,
        rope_quantize_queries,
    )
    from mla_portable_triton.kernels.config import config_for

    for layout in ("bf16", "fp8_ds_mla"):
        for heads in (1, 16, 64, 128):
            config = attention_config(arch, layout, heads)
            assert min(config.block_h, config.block_n) >= 16 and config.num_warps * 64 <= 1024
    data = cache_write, concat_mla_k, convert_indices, gather_upconvert, indexer_cache_write, quantize_per_tensor
    for kernel in (*data, norm_rope_write, rope_quantize_queries):
        assert config_for(kernel.CONFIGS, arch).num_warps * 64 <= 1024
    for table in (indexer_logits.DECODE, indexer_logits.PREFILL):
        tiles = table.get(arch, table["default"])
        # more than 64 heads take half the positions
        assert tiles.positions >= 2 * 16 and tiles.num_warps * 64 <= 1024


def test_no_corex_device_asks_for_the_e4m3_type(monkeypatch):
    """What opens the gate of the float8 rule is the device's fact."""
    from mla_portable_iluvatar.detection import Evidence, Signals, characterise
    from mla_portable_triton.bind_attention import bind_sparse_prefill
    from mla_portable_triton.kernels import sparse_attention

    facts = characterise(Signals("cuda", "TG-V200 OAM", (8, 0)), Evidence("device name"), graph_capture=None)
    assert isinstance(facts, DeviceFacts) and facts.warp_size == 64
    seen: list[bool] = []
    monkeypatch.setattr(sparse_attention, "launch", lambda *args, fp8, **more: seen.append(fp8["E4M3_NATIVE"]))
    import torch

    call = bind_sparse_prefill(Request(SPARSE_PREFILL, facts, kv_layout="fp8_ds_mla", num_heads=2))
    q, kv = torch.zeros(1, 2, 576, dtype=torch.bfloat16), torch.zeros(1, 1, 656, dtype=torch.uint8)
    call(q, kv, torch.zeros(1, 4, dtype=torch.int32), softmax_scale=1.0)
    assert seen == [False]


class Recorded:
    """A registrar that keeps implementations."""

    def __init__(self) -> None:
        self.found = []

    def add(self, implementation) -> None:
        self.found.append(implementation)

    def add_costs(self, costs: str) -> None:
        pass

    def add_tunables(self, load) -> None:
        pass


def test_what_needs_triton_3_is_refused_below_it(monkeypatch: pytest.MonkeyPatch):
    from mla_portable_triton import support

    module = SimpleNamespace(__version__="2.1.0")
    monkeypatch.setattr(support, "import_module", lambda name: module)
    monkeypatch.setattr(support, "interpreter_is_on", lambda: False)
    gpu = DeviceFacts(vendor="iluvatar", name="BI-V150", arch="ivcore11")
    assert [str(reason) for reason in support.check_triton_3(gpu)] == ["triton 2.1.0 (needs 3.0 or newer)"]
    module.__version__ = "3.1.0"
    assert list(support.check_triton_3(gpu)) == []
    assert all((KERNELS / f"{name}.py").is_file() for name in NEED_TRITON_3)
    recorder = Recorded()
    mla_portable_triton.mla_portable_register(recorder)
    checks = {implementation.primitive: implementation.check for implementation in recorder.found}
    newer = {str(primitive) for primitive, check in checks.items() if check is support.check_triton_3}
    # each kernel file that is passed over here is offered with the check, but for what such files share
    assert newer - {"indexer_select"} == NEED_TRITON_3 - {"index_keys"}
