# SPDX-License-Identifier: Apache-2.0
"""The Triton plugin as the registry sees it: what it registers, what it imports for that, and why it says it cannot run."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from fake_plugins import make_plugin
from machines import H200

import mla_portable_triton
from mla_portable import primitives
from mla_portable.attention import AttentionSpec, SparseMLAAttention
from mla_portable.choose import Registry
from mla_portable.contracts import (
    Detector,
    DeviceFacts,
    Implementation,
    Primitive,
    Reason,
    Request,
    ScheduleLimits,
    Support,
    Tunable,
)
from mla_portable.dispatch import serving
from mla_portable.kit.split_kv import ProgramShape, split_kv
from mla_portable.primitives import (
    CONCAT_MLA_K,
    CONVERT_INDICES,
    INDEXER_SELECT,
    MASKED_PREFILL,
    MERGE_STATES,
    NORM_ROPE_WRITE,
    PACK_SELECTION,
    QUANTIZE_PER_TENSOR,
    ROPE_QUANTIZE_QUERIES,
    SPARSE_DECODE,
    TOPK_SELECT,
)
from mla_portable_triton import support
from mla_portable_triton.attention_configs import AttentionConfig, attention_config, program_shape

ANY_HEADS = CONCAT_MLA_K, ROPE_QUANTIZE_QUERIES
CPU = DeviceFacts(vendor="cpu", name="cpu", arch="cpu", device_type="cpu")


class Recorder:
    """A registrar that keeps what it is given."""

    def __init__(self) -> None:
        self.implementations: list[Implementation] = []

    def add(self, implementation: Implementation) -> None:
        self.implementations.append(implementation)

    def add_costs(self, costs: Path) -> None:
        assert costs.is_dir()

    def add_tunables(self, load: Callable[[], Iterable[Tunable]]) -> None:
        assert {tunable.implementation for tunable in load()} == {"triton.portable"}

    def add_detector(self, detector: Detector) -> None:
        raise AssertionError(f"the Triton plugin knows no devices of its own, got {detector}")


@pytest.fixture
def offered() -> dict[Primitive, Implementation]:
    recorder = Recorder()
    mla_portable_triton.mla_portable_register(recorder)
    assert len(recorder.implementations) == len(Primitive.all())
    return {implementation.primitive: implementation for implementation in recorder.implementations}


def reasons(device: DeviceFacts) -> list[Reason]:
    return list(support.check(device))


def test_it_offers_every_primitive(offered: dict[Primitive, Implementation]) -> None:
    assert set(offered) == set(Primitive.all())
    assert {implementation.name for implementation in offered.values()} == {"triton.portable"}
    assert {implementation.preference for implementation in offered.values()} == {50.0}
    kinds = {primitive: implementation.schedule_kind for primitive, implementation in offered.items()}
    assert kinds.pop(SPARSE_DECODE).name == "split_kv"
    assert set(kinds.values()) == {None}


@pytest.mark.parametrize("primitive", list(Primitive.all()), ids=str)
def test_a_bound_callable_has_the_signature_of_its_protocol(
    primitive: Primitive, offered: dict[Primitive, Implementation]
) -> None:
    layout = {"kv": "fp8_ds_mla", "index": "index_fp8"}.get(primitive.cache)
    bound = offered[primitive].bind(Request(primitive, CPU, kv_layout=layout, num_heads=16))
    call = getattr(primitives, "".join(word.capitalize() for word in str(primitive).split("_"))).__call__
    want, got = (list(inspect.signature(each).parameters.values()) for each in (call, bound))
    second = [p.name for p in got if p.name.startswith("extra_")]
    assert second == (["extra_kv_cache", "extra_indices", "extra_lengths"] if offered[primitive].support.extra_cache else [])
    own = [(p.name, p.kind, p.default) for p in got if p.name not in second]
    assert own == [(p.name, p.kind, p.default) for p in want[1:]]


@pytest.mark.parametrize("primitive", list(Primitive.all()), ids=str)
def test_support_accepts_what_it_should(primitive: Primitive, offered: dict[Primitive, Implementation]) -> None:
    layout = {"kv": "fp8_ds_mla", "index": "index_fp8"}.get(primitive.cache)
    shapes = {"kv_layout": layout, "num_heads": 16, "topk": 100, "block_size": 61, "graph": True}
    if primitive in (MERGE_STATES, QUANTIZE_PER_TENSOR):
        shapes = {"graph": True}
    elif primitive in (TOPK_SELECT, PACK_SELECTION):
        shapes = {"topk": 100, "graph": True}
    elif primitive is NORM_ROPE_WRITE:
        shapes = {"kv_layout": "fp8_nope", "index_layout": "index_bf16", "block_size": 61, "graph": True}
    elif primitive in ANY_HEADS:
        shapes = {"num_heads": 16, "graph": True}
    elif primitive is MASKED_PREFILL:
        shapes = {"num_heads": 16, "qk_head_dim": 192, "v_head_dim": 128, "selection": True, "graph": True}
    declared = offered[primitive].support
    assert declared.reasons(Request(primitive, H200, **shapes)) == ()
    assert declared.reasons(Request(primitive, CPU, **shapes)) == ()
    assert [reason.subject for reason in declared.reasons(Request(primitive, H200, num_heads=129))] == (
        ["num_heads"] if "num_heads" in primitive.facts and primitive not in ANY_HEADS else []
    )


def test_a_small_device_is_told_what_attention_needs(offered: dict[Primitive, Implementation]) -> None:
    small = DeviceFacts(vendor="acme", name="acme", arch="a1", shared_memory=32 << 10)
    found = offered[SPARSE_DECODE].support.reasons(Request(SPARSE_DECODE, small))
    assert [str(reason) for reason in found] == ["shared memory 32768 bytes (needs 49152)"]
    assert offered[CONVERT_INDICES].support.reasons(Request(CONVERT_INDICES, small)) == ()


@pytest.mark.parametrize("layout", ["fp8_ds_mla", "bf16"])
@pytest.mark.parametrize(("heads", "rows", "splits"), [(16, 16, 16), (16, 64, 4), (64, 16, 8), (64, 64, 2), (128, 64, 1)])
def test_a_planner_cuts_rows_for_the_blocks_that_run(
    offered: dict[Primitive, Implementation], heads: int, rows: int, splits: int, layout: str
) -> None:
    """Blocks of 16 and 32 heads have 4 warps, and a multiprocessor of an H200 runs two; of 64 heads and 8 warps it runs one."""
    request = Request(SPARSE_DECODE, H200, kv_layout=layout, num_heads=heads)
    limits = ScheduleLimits(torch.device("cpu"), heads, 2048, max_num_rows=64, num_sms=132, request=request)
    assert offered[SPARSE_DECODE].schedule_kind.planner(limits).get(rows, 1).num_splits == splits


def test_shared_memory_bounds_how_many_blocks_run_at_once() -> None:
    config = AttentionConfig(block_h=32, block_n=32, num_warps=4, num_stages=3)  # 79 KiB of fp8 rows, 110 KiB of bf16
    on = {kib: replace(H200, shared_memory=kib << 10) for kib in (99, 163, 227)}
    found = {(kib, kv): program_shape(config, kv, device).per_sm for kib, device in on.items() for kv in ("fp8_ds_mla", "bf16")}
    assert found == {
        (99, "fp8_ds_mla"): 1,
        (163, "fp8_ds_mla"): 2,
        (227, "fp8_ds_mla"): 2,
        (99, "bf16"): 1,
        (163, "bf16"): 1,
        (227, "bf16"): 2,
    }


def test_a_layer_gives_its_planner_the_shape_of_a_block() -> None:
    spec = AttentionSpec(num_heads=16, softmax_scale=0.1, max_num_tokens=4, max_num_reqs=4, max_model_len=64, topk=16)
    layer = SparseMLAAttention(spec, device="cpu", backend="triton")
    config = layer.planner_config()
    limits = ScheduleLimits(layer.device, 16, 2048, 4, num_sms=132, request=config.decode_request)
    schedule = config.schedule_kind.planner(limits).get(2, 2)
    program = program_shape(attention_config("cpu", "fp8_ds_mla", 16), "fp8_ds_mla", CPU)
    assert program != ProgramShape()
    shape = {"num_rows": 4, "num_heads": 16, "topk": 2048, "num_sms": 132}
    assert schedule.num_splits == split_kv(**shape, program=program) != split_kv(**shape)


def test_importing_and_registering_bring_in_neither_triton_nor_a_kernel() -> None:
    script = """
import sys
import mla_portable_triton
class Registrar:
    def add(self, implementation): pass
    def add_costs(self, costs): pass
    def add_tunables(self, load): pass
mla_portable_triton.mla_portable_register(Registrar())
heavy = [name for name in sys.modules if name == "triton" or name.startswith("mla_portable_triton.kernels")]
assert not heavy, heavy
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_check_is_content_where_triton_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert reasons(CPU) == []
    assert reasons(H200) == []
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert reasons(H200) == []


def test_check_names_the_interpreter_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    (reason,) = reasons(CPU)
    assert str(reason) == "device type cpu (triton runs on a CPU only in its interpreter)"
    assert "TRITON_INTERPRET=1" in reason.remedy


@pytest.mark.parametrize("device", [CPU, H200], ids=str)
def test_check_says_how_to_get_triton(device: DeviceFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    (reason,) = reasons(device)
    assert reason.subject == "triton"
    assert reason.given.startswith("cannot be imported: ")
    assert reason.remedy == "pip install triton"


def a_triton(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Triton from before there were knobs, with an interpreter."""
    old = ModuleType("triton")
    old.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", old)
    monkeypatch.setattr(support, "find_spec", lambda name: object())


@pytest.mark.parametrize("version", ["2.0.0", "1.1", "unknown"])
def test_check_refuses_a_triton_that_is_too_old(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a_triton(version, monkeypatch)
    (reason,) = reasons(H200)
    assert str(reason) == f"triton {version} (needs 2.1 or newer)"
    assert reason.remedy == "pip install --upgrade triton"


@pytest.mark.parametrize("version", ["2.1.0", "2.1.0+corex.4.2.0", "3.1.0", "3.10.0"])
def test_check_takes_an_older_triton_that_has_no_knobs(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a_triton(version, monkeypatch)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert reasons(H200) == []
    assert [reason.subject for reason in reasons(CPU)] == ["device type"]


def test_the_interpreter_of_an_older_triton_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    a_triton("3.1.0", monkeypatch)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for device in (H200, CPU):
        (reason,) = reasons(device)
        assert str(reason) == "triton's interpreter 3.1.0 (needs 3.5 or newer)"
    # 2.1 has no such module, and does not look at the variable
    monkeypatch.setattr(support, "find_spec", lambda name: None)
    assert reasons(H200) == [] and [reason.subject for reason in reasons(CPU)] == ["device type"]


def test_a_selection_is_probed_alone_and_takes_the_topk_that_is_chosen() -> None:
    called: list[int] = []

    def topk_select(*arguments: torch.Tensor, topk: int, out: torch.Tensor | None = None) -> torch.Tensor:
        called.append(topk)
        return TOPK_SELECT.reference(*arguments, topk=topk, out=out)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    fast = Implementation(
        "fast.v1", TOPK_SELECT, Support(source="a test", device_types=(device,)), lambda request: topk_select, preference=1
    )
    plugins = [("reference", "mla_portable.reference"), ("triton", mla_portable_triton), ("fast", make_plugin(fast))]
    registry = Registry(plugins=plugins, environ={})
    with serving(registry):
        request = Request(INDEXER_SELECT, registry.facts(device), kv_layout="index_fp8", num_heads=2, topk=16, block_size=16)
        assert registry.decide(request).chosen == "triton.portable" and called == []
        call = registry.bind(request)
        called.clear()  # of the probe of fast.v1
        keys = torch.zeros(3, 16, 132, dtype=torch.uint8, device=device)
        q, weights = torch.zeros(1, 2, 128, device=device).to(torch.float8_e4m3fn), torch.zeros(1, 2, device=device)
        start, length, table = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 1], [20], [[0, 2]]))
        assert call(q, weights, keys, start, length, table, topk=16).tolist() == [[*range(16)]]
    assert called == [16]
