# SPDX-License-Identifier: Apache-2.0
"""The portable kernels keep to what CoreX's Tritons accept, and the lint that says so sees each kind of breach."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

import mla_portable_triton
from mla_portable.contracts import DeviceFacts, Request
from mla_portable.primitives import SPARSE_PREFILL

ROOT = Path(__file__).parents[1]
lint = SimpleNamespace(**runpy.run_path(str(ROOT / "ci" / "corex.py")))
KERNELS = lint.kernels()

KERNEL = """
@triton.jit(do_not_specialize=["n"])
def some_kernel(x_ptr, n, stride, WIDTH: tl.constexpr, E4M3_NATIVE: tl.constexpr):
    {body}

def launch(x, n):
    some_kernel[(n,)](x, n, 1, WIDTH=4, E4M3_NATIVE=False, num_warps=4{option})
"""
GOOD = "x = tl.load(x_ptr + tl.arange(0, WIDTH) * stride + n.to(tl.int64))"
BREACHES = {
    "float64": "x = tl.load(x_ptr).to(tl.float64)",
    "float8": "x = tl.load(x_ptr).to(tl.float8e4nv, bitcast=True)",
    "float8, behind something else": "if WIDTH:\n        x = tl.load(x_ptr).to(tl.float8e4nv, bitcast=True)",
    "float8, in the other branch": (
        "if E4M3_NATIVE:\n        x = 1\n    else:\n        x = tl.load(x_ptr).to(tl.float8e4nv, bitcast=True)"
    ),
    "names": "x = tl.make_tensor_descriptor(x_ptr, [n], [1], [4])",
    "names, of newer loops": "for i in tl.range(0, n):\n        x = i",
    "names, of math": "x = tl.math.erf(tl.load(x_ptr))",
    "names, which moved": "x = tl.exp2(tl.load(x_ptr))",
    "dot, an accumulator": "x = tl.dot(tl.load(x_ptr), tl.load(x_ptr), tl.zeros([16, 16], tl.float32))",
    "dot": "x = tl.dot(tl.load(x_ptr), tl.load(x_ptr), input_precision='ieee')",
    "dot, four operands": "x = tl.dot(tl.load(x_ptr), tl.load(x_ptr), tl.zeros([16, 16], tl.float32), 'ieee')",
    "shapes": "x = tl.full([], 0, tl.int64)",
    "shapes, by name": "x = tl.zeros(shape=(), dtype=tl.int64)",
    "integers": "x = stride.to(tl.int64)",
    "integers, in a branch": "if stride == 1:\n        x = tl.load(x_ptr)",
}
OPTIONS = {"launch, a cluster": ", num_ctas=2", "launch, dependent": ", launch_pdl=True", "launch, hidden": ", **more"}


def rules(body: str, option: str = "") -> list[str]:
    return [finding.rule for finding in lint.lint_source(KERNEL.format(body=body, option=option))]


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_the_kernels_keep_to_triton_2_1(path):
    assert lint.lint_source(path.read_text()) == []


def test_there_are_kernels_to_look_at():
    assert len(KERNELS) >= 8 and sum(len(list(lint._jitted(lint.ast.parse(path.read_text())))) for path in KERNELS) >= 12


def test_a_kernel_that_keeps_to_it_has_no_finding():
    assert rules(GOOD) == []
    assert rules("x = tl.math.exp2(tl.load(x_ptr))") == []
    assert rules("if E4M3_NATIVE:\n        x = tl.load(x_ptr).to(tl.float8e4nv, bitcast=True)") == []


@pytest.mark.parametrize("name", BREACHES)
def test_each_breach_is_found(name):
    assert rules(BREACHES[name]) == [name.partition(",")[0]]


@pytest.mark.parametrize("name", OPTIONS)
def test_each_launch_option_is_found(name):
    assert rules(GOOD, OPTIONS[name]) == ["launch"]


def test_a_mark_on_no_argument_is_found():
    assert [f.rule for f in lint.lint_source(KERNEL.format(body=GOOD, option="").replace('["n"]', '["m", "n"]'))] == [
        "integers"
    ]


@pytest.mark.parametrize("arch", ["ivcore10", "ivcore11", "ivcore20", "ivcore30", "ivcore"])
def test_configurations_suit_warps_of_64_and_the_least_dot(arch):
    """Axes of a dot are 16 at least, bytes of shared memory 48 KiB at most where more is not known, threads 1024 at most."""
    from mla_portable_triton.attention_configs import attention_config
    from mla_portable_triton.kernels import (
        cache_write,
        convert_indices,
        gather_upconvert,
        indexer_cache_write,
        indexer_logits,
        quantize_per_tensor,
    )
    from mla_portable_triton.kernels.config import config_for

    for layout in ("bf16", "fp8_ds_mla"):
        for heads in (1, 16, 64, 128):
            config = attention_config(arch, layout, heads)
            assert min(config.block_h, config.block_n) >= 16 and config.num_warps * 64 <= 1024
    for kernel in (cache_write, convert_indices, gather_upconvert, indexer_cache_write, quantize_per_tensor):
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


def test_what_needs_triton_3_is_refused_below_it(monkeypatch: pytest.MonkeyPatch):
    from mla_portable_triton import support

    module = SimpleNamespace(__version__="2.1.0")
    monkeypatch.setattr(support, "import_module", lambda name: module)
    monkeypatch.setattr(support, "interpreter_is_on", lambda: False)
    gpu = DeviceFacts(vendor="iluvatar", name="BI-V150", arch="ivcore11")
    assert [str(reason) for reason in support.check_triton_3(gpu)] == ["triton 2.1.0 (needs 3.0 or newer)"]
    module.__version__ = "3.1.0"
    assert list(support.check_triton_3(gpu)) == []
    assert all((lint.KERNELS / name).is_file() for name in lint.NEED_TRITON_3)
    recorder = Recorded()
    mla_portable_triton.mla_portable_register(recorder)
    checks = {implementation.primitive: implementation.check for implementation in recorder.found}
    newer = {str(primitive) for primitive, check in checks.items() if check is support.check_triton_3}
    # each kernel file that the lint passes over is offered with the check, but for what such files share
    assert newer - {"indexer_select"} == {name.removesuffix(".py") for name in lint.NEED_TRITON_3} - {"index_keys"}
