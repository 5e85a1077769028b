# SPDX-License-Identifier: Apache-2.0
"""Tuning the Triton plugin's attention: what is tried on a device, what is bound, and `mla-portable tune` from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import compiling
from machines import B200, BI_V150, CPU, H200, MACHINES, MI300X, RTX_4090
from typer.testing import CliRunner

from mla_portable.choose import Registry
from mla_portable.cli.app import app
from mla_portable.contracts import DeviceFacts, InvalidArgument, Primitive, Request
from mla_portable.dispatch import current_registry
from mla_portable.kit.split_kv import ProgramShape, SplitSchedule, split_kv
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL
from mla_portable.times.adding import add_to_file
from mla_portable.times.files import parse_times
from mla_portable.times.records import MeasuredTime, Measurement
from mla_portable_triton import NAME, bind_attention
from mla_portable_triton.attention_configs import CONFIGS, AttentionConfig, attention_config, shared_memory
from mla_portable_triton.attention_tuning import bound_config, configurations
from mla_portable_triton.kernels import merge_states, sparse_attention
from mla_portable_triton.tile_rows import SHARED_MEMORY

DECODE, PREFILL = SPARSE_DECODE, SPARSE_PREFILL
LAYOUTS = ("bf16", "fp8_ds_mla")
CONFIGURATION = {"block_h": 16, "block_n": 64, "num_warps": 8, "num_stages": 1}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The user's own times: none yet, and never those of whoever runs the tests."""
    path = tmp_path / "times"
    monkeypatch.setenv("MLA_PORTABLE_TIMES", str(path))
    yield path
    monkeypatch.undo()
    current_registry().reload_policy()  # the registry of the process forgets what a test wrote there


def request_for(device: DeviceFacts = H200, layout: str = "fp8_ds_mla", heads: int = 16, **others: Any) -> Request:
    return Request(others.pop("primitive", DECODE), device, kv_layout=layout, num_heads=heads, topk=64, **others)


def configured(request: Request, configuration: dict[str, int]) -> Request:
    return request.but(configuration=tuple(configuration.items()))


def row(request: Request, configuration: dict[str, int]) -> list[MeasuredTime]:
    heads, layout, name = request.num_heads, request.kv_layout, str(request.primitive)
    origin, named = Measurement(request.device.name, (request.device.name,), "2026-11-22"), tuple(configuration.items())
    return [MeasuredTime(NAME, name, layout, heads, None, 1, 1.0, origin, configuration=named)]


# ---------------------------------------------------------------------- what is tried


@pytest.mark.parametrize("heads", [1, 16, 32, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("device", MACHINES.values(), ids=MACHINES)
def test_what_is_tried_can_be_bound(device: DeviceFacts, layout: str, heads: int):
    request = request_for(device, layout, heads)
    tried = configurations(request)
    assert tried[0] == asdict(attention_config(device.arch, layout, heads)), "what holds without tuning comes first"
    assert 1 < len(tried) <= 24 and len({tuple(each.items()) for each in tried}) == len(tried)
    assert all(each["block_h"] == 16 or each["block_h"] < 2 * heads for each in tried[1:])
    assert [asdict(bound_config(configured(request, each))) for each in tried] == tried


def test_heads_memory_and_registers_bound_what_is_tried():
    def tried(name: str, *of: Any) -> set[int]:
        return {each[name] for each in configurations(request_for(*of))}

    assert tried("block_h", H200, "fp8_ds_mla", 16) == {16}
    assert tried("block_h", H200, "fp8_ds_mla", 64) == {32, 16}
    assert tried("block_h", H200, "bf16", 64) == {64, 32}
    assert tried("block_h", BI_V150, "bf16", 64) == {16, 64, 32}, "what ships for nobody in particular, and tall ones"
    # nothing taller than what ships where the architecture is known: on sm100 that would not even start
    assert tried("block_h", B200, "bf16", 128) == {32, 16}
    assert tried("block_n", H200, "fp8_ds_mla", 16) == {16, 32, 64}
    assert not [each for each in configurations(request_for(RTX_4090)) if each["block_n"] == 64 and each["num_stages"] > 2]
    assert {each["num_warps"] for each in configurations(request_for(H200, "bf16", 64)) if each["block_h"] == 64} == {8}
    assert {each["num_warps"] for each in configurations(request_for(MI300X, "bf16", 64)) if each["block_h"] == 64} == {4, 8}
    assert tried("num_warps", CPU) == tried("num_stages", CPU) == {1}


def test_the_plugin_says_what_can_be_tuned():
    found = {each.primitive: each for each in Registry(environ={}).tunables().found if each.implementation == NAME}
    assert set(found) == {DECODE, PREFILL}


@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_ships_fits_by_the_same_estimate(arch: str, layout: str):
    for _, config in CONFIGS[arch][layout]:
        assert shared_memory(config, layout, arch) <= SHARED_MEMORY[arch]


COMPILED = [
    ("sm80", "bf16", AttentionConfig(32, 16, 4, 3)),
    ("sm90", "bf16", AttentionConfig(64, 32, 8, 2)),
    ("sm90", "fp8_ds_mla", AttentionConfig(32, 64, 8, 3)),
    ("gfx942", "bf16", AttentionConfig(16, 16, 4, 3)),
    ("gfx942", "fp8_ds_mla", AttentionConfig(32, 16, 4, 2)),
]
# runs without the interpreter; prints the bytes of shared memory that the compiler asks for
COMPILE = """
import dataclasses, json, sys
from mla_portable_triton import aot, compile_all
from mla_portable_triton.kernels import sparse_attention

def shared(arch, layout, config):
    variants = compile_all.variants_of(sparse_attention, arch)
    variant = next(v for v in variants if f"-{layout}-" in v.label and v.label.endswith("split"))
    sizes = {"BLOCK_H": config["block_h"], "BLOCK_N": config["block_n"], "NUM_HEADS": config["block_h"]}
    options = {name: config[name] for name in ("num_warps", "num_stages")}
    variant = dataclasses.replace(variant, constexprs={**variant.constexprs, **sizes}, **options)
    return aot.compile_variant(variant, arch).shared

print(json.dumps([shared(*case) for case in json.loads(sys.argv[1])]))
"""


def test_the_estimate_is_what_the_compiler_asks_for_at_most(tmp_path: Path):
    cases = json.dumps([(arch, layout, asdict(config)) for arch, layout, config in COMPILED])
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, cases], env=compiling(tmp_path), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for (arch, layout, config), asked in zip(COMPILED, json.loads(done.stdout), strict=True):
        estimate = shared_memory(config, layout, arch)
        assert asked <= estimate <= 1.1 * asked, f"{arch} {layout} {config}: {asked} bytes asked for, {estimate} estimated"


# ---------------------------------------------------------------------- what is bound


@pytest.mark.parametrize(
    ("device", "changes", "word"),
    [
        (H200, {"block_m": 16}, r"the names block_h, block_n, num_warps, num_stages"),
        (H200, {"block_n": 48}, "block_n=48 .*powers of two"),
        (H200, {"block_h": 8}, "tiles of at least 16"),
        (H200, {"num_warps": 0}, "powers of two"),
        (H200, {"num_stages": 0}, "num_stages of at least 1"),
        (MI300X, {"num_warps": 32}, "at most 1024 threads, in warps of 64"),
        (RTX_4090, {"num_stages": 3}, r"at most 101376 bytes of shared memory, not 104448"),
    ],
)
@pytest.mark.parametrize("bind", [bind_attention.bind_sparse_decode, bind_attention.bind_sparse_prefill])
def test_a_configuration_with_unknown_names_or_values_is_refused(
    folder: Path, bind: Callable[..., object], device: DeviceFacts, changes: dict[str, int], word: str
):
    primitive = DECODE if bind is bind_attention.bind_sparse_decode else PREFILL
    request = request_for(device, primitive=primitive)
    with pytest.raises(InvalidArgument, match=rf"{NAME} / {primitive} on .*{word}"):
        bind(configured(request, CONFIGURATION | changes))
    bind(request)
    add_to_file(folder / "tuned.json", row(request, CONFIGURATION | changes))
    registry = Registry(facts={"cuda": device}, environ={"MLA_PORTABLE_TIMES": str(folder)})
    (implementation,) = (each for each in registry.implementations(primitive) if each.name == NAME)
    with pytest.raises(InvalidArgument, match=rf"tuned\.json: .*{NAME} / {primitive} on .*{word}.*Run `mla-portable tune`"):
        registry.bind(request, backend=NAME)
    registry.bind_implementation(implementation, request.but(num_heads=32))  # the file has no row for 32 heads


def test_a_row_without_names_is_refused():
    with pytest.raises(InvalidArgument, match="got nothing, expected the names"):
        bound_config(configured(request_for(), {}))


@pytest.mark.parametrize("primitive", [DECODE, PREFILL])
def test_the_configuration_is_taken_when_binding(monkeypatch: pytest.MonkeyPatch, primitive: Primitive):
    used: list[AttentionConfig] = []
    monkeypatch.setattr(sparse_attention, "launch", lambda *args, config, **options: used.append(config))
    monkeypatch.setattr(merge_states, "launch", lambda *args, **options: None)
    bind = getattr(bind_attention, f"bind_{primitive}")
    request = request_for(primitive=primitive)
    requests = configured(request, CONFIGURATION), configured(request, CONFIGURATION | {"num_stages": 2})
    calls = [*map(bind, requests), bind(request.but(kv_layout="bf16"))]
    q, indices = torch.zeros(2, 1, 16, 576, dtype=torch.bfloat16), torch.zeros(2, 1, 64, dtype=torch.int32)
    if primitive is PREFILL:
        q, indices = q[:, 0], indices[:, 0]
    for call in (*calls, calls[0]):
        call(q, torch.zeros(1, 64, 656, dtype=torch.uint8), indices, softmax_scale=1.0)
    tuned = AttentionConfig(**CONFIGURATION)
    assert used == [tuned, replace(tuned, num_stages=2), attention_config("sm90", "bf16", 16), tuned]


def test_a_schedule_of_its_own_is_cut_by_the_tuned_tiles(monkeypatch: pytest.MonkeyPatch):
    made: list[int] = []

    def recorded(*args: Any) -> SplitSchedule:
        made.append(args[3])
        return SplitSchedule(*args)

    monkeypatch.setattr(bind_attention, "SplitSchedule", recorded)
    monkeypatch.setattr(sparse_attention, "launch", lambda *args, **options: None)
    monkeypatch.setattr(merge_states, "launch", lambda *args, **options: None)
    request = request_for(heads=32)
    q, indices = torch.zeros(8, 1, 32, 576, dtype=torch.bfloat16), torch.zeros(8, 1, 2048, dtype=torch.int32)
    shape = {"num_rows": 8, "num_heads": 32, "topk": 2048, "num_sms": H200.num_sms}
    wanted = [split_kv(**shape, program=ProgramShape(*program)) for program in ((32, 32, 2), (16, 64, 1))]
    assert wanted[0] != wanted[1]
    for each in (request, configured(request, CONFIGURATION)):
        bind_attention.bind_sparse_decode(each)(q, torch.zeros(1, 64, 656, dtype=torch.uint8), indices, softmax_scale=1.0)
    assert made == wanted


# ---------------------------------------------------------------------- from end to end


@pytest.mark.parametrize(("primitive", "layout"), [(DECODE, "fp8_ds_mla"), (PREFILL, "bf16")])
def test_tune_writes_what_the_next_bind_reads(folder: Path, monkeypatch: pytest.MonkeyPatch, primitive: Primitive, layout: str):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    words = ["tune", "--device", device, "--primitive", str(primitive), "--layout", layout, "--backend", NAME]
    sizes = ["--heads", "16", "--rows", "2", "--topk", "64", "--repeat", "2", "--check-rows", "1"]
    done = CliRunner().invoke(app, [*words, *sizes, "--json"])
    assert done.exit_code == 0, done.output + repr(done.exception)
    request = request_for(current_registry().facts(torch.device(device)), layout, primitive=primitive)
    (result,) = json.loads(done.stdout)["results"]
    assert [each["configuration"] for each in result["attempts"]] == configurations(request)
    assert [each["why"] for each in result["attempts"]] == [""] * len(result["attempts"])
    (path,) = folder.glob("*.json")
    (written,) = parse_times(path.read_text()).times
    assert (written.implementation, written.primitive, written.layout, written.heads) == (NAME, str(primitive), layout, 16)
    assert written.measurement.device == request.device.name and written.rows == 2
    best = dict(written.configuration or ())
    asked = ["explain", str(primitive), "--device", device, "--layout", layout, "--heads", "16", "--backend", NAME]
    current_registry().reload_policy()
    explained = CliRunner().invoke(app, [*asked, "--json"])
    assert json.loads(explained.stdout)["tuned"] == best
    said = CliRunner().invoke(app, asked).stdout
    assert f"tuned   block_h={best['block_h']} block_n=" in said and path.name in said
    bound: list[dict[str, int]] = []

    def recorded(request: Request) -> AttentionConfig:
        config = bound_config(request)
        bound.append(asdict(config))
        return config

    monkeypatch.setattr(bind_attention, "bound_config", recorded)
    wanted = [best, *configurations(request)[:2]]  # whichever won, it holds because it is written there
    for each in wanted:
        add_to_file(path, row(request, each))
        Registry(environ={"MLA_PORTABLE_TIMES": str(folder)}, probe=False).bind(request, backend=NAME)
    assert bound == wanted


def test_what_is_tried_computes_what_is_timed(monkeypatch: pytest.MonkeyPatch):
    """A configuration that tune binds is the one that runs: spoil one, and it alone is found wrong."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    real = sparse_attention.launch

    def launch(*args: Any, config: AttentionConfig, **options: Any) -> None:
        real(*args, config=config, **options)
        if config.block_n == 64:
            args[0].fill_(1.0)

    monkeypatch.setattr(sparse_attention, "launch", launch)
    words = ["tune", "--device", device, "--primitive", "sparse_decode", "--layout", "bf16", "--backend", NAME, "--json"]
    sizes = ["--heads", "16", "--rows", "1", "--topk", "16", "--repeat", "1", "--check-rows", "1"]
    done = CliRunner().invoke(app, [*words, *sizes])
    assert done.exit_code == 0, done.output + repr(done.exception)
    (result,) = json.loads(done.stdout)["results"]
    assert len({bool(each["why"]) for each in result["attempts"]}) == 2
    assert all(bool(each["why"]) == (each["configuration"]["block_n"] == 64) for each in result["attempts"])
