# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 and V4.1: which class a model is given, and that the derived layer attends to what vLLM's metadata names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import types
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepseek_v4
import pytest
import torch
import v4_layer
from deepseek_v4 import Sizes, stock_class
from machines import MACHINES
from prometheus_client import REGISTRY, generate_latest
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm_engine import CPU, make_config

from mla_portable import use
from mla_portable.attention import SlotAttention
from mla_portable.choose import Registry
from mla_portable.cli.doctor.reading import in_log, in_metrics
from mla_portable.contracts import InvalidArgument
from mla_portable.engines.common.routing import route_pairs
from mla_portable.engines.vllm import indexer_choice, plugin, settings
from mla_portable.engines.vllm.status import vllm_status
from mla_portable.engines.vllm.v4 import choice, kinds, layer

SIZES = Sizes(topk=24, chosen=21, max_tokens=160, max_len=1024, blocks=40, device=CPU)
HEADS = 4
"""Queries are padded to 8."""
VERSIONS = ["", *(["1"] if importlib.util.find_spec("vllm.models.deepseek_v41") else [])]
"""V4, and V4.1 where this vLLM has it (0.30 and later)."""

BATCHES = {
    "decodes": ([1, 1, 1], [1, 200, 700], 3, 0),
    "decodes, padded": ([1, 1], [130, 513], 2, 3),
    "drafts": ([2, 2], [127, 641], 2, 0),
    "prompts": ([6, 40], [6, 300], 0, 0),
    "mixed": ([1, 1, 30, 5], [300, 9, 30, 600], 2, 0),
}


@cache
def config() -> Any:
    return make_config()


class Case:
    """A derived layer with its caches, and what one step makes of it."""

    def __init__(self, kind: str, version: str = "") -> None:
        self.caches = deepseek_v4.make_caches(kind, SIZES, version)
        self.layer = deepseek_v4.make_layer(choice.derived(stock_class(version)), self.caches, HEADS)

    def step(self, query_lens: list[int], seq_lens: list[int], num_decodes: int, padding: int = 0) -> deepseek_v4.Step:
        return deepseek_v4.make_step(self.caches, HEADS, query_lens, seq_lens, num_decodes=num_decodes, padding=padding)

    def run(self, step: deepseek_v4.Step) -> torch.Tensor:
        """What the layer's own `forward_mqa` writes in vLLM's forward context."""
        q, output = deepseek_v4.prepared(self.layer, step)
        with set_forward_context(step.metadata, config()):
            self.layer.forward_mqa(q, q[:, 0], torch.arange(len(q)), output)
        return output[:, :HEADS]

    def check(self, *batch: Any) -> None:
        step = self.step(*batch)
        got, tokens = self.run(step), sum(batch[0])
        wanted = torch.stack([step.wanted(self.caches, token, self.layer.attn_sink[:HEADS]) for token in range(tokens)])
        torch.testing.assert_close(got[:tokens].double(), wanted, rtol=1e-2, atol=8e-3)


LAYERS = [("", kind, batch) for kind in ("window", "selected", "all") for batch in BATCHES]
LAYERS += [(v, kind, batch) for v in VERSIONS if v for kind in ("window", "selected") for batch in ("decodes, padded", "mixed")]


@pytest.mark.parametrize("version, kind, batch", LAYERS)
def test_every_token_attends_to_its_window_and_its_compressed_tokens(version: str, kind: str, batch: str):
    Case(kind, version).check(*BATCHES[batch])


@pytest.mark.parametrize("kind", ["window", "selected"])
def test_lists_that_are_wider_than_the_window_are_served(kind: str):
    """For images in prompts and for drafts that see one another. Such a list is bound once."""
    case = Case(kind)
    step = case.step(*BATCHES["mixed"])
    wanted, metadata = case.run(step), step.metadata[case.layer.swa_cache_layer.prefix]
    for name in ("decode_swa_indices", "prefill_swa_indices"):
        wide = torch.nn.functional.pad(getattr(metadata, name), (0, 64), value=-1)
        setattr(metadata, name, wide)
    got = case.run(step)
    tokens = sum(BATCHES["mixed"][0])
    torch.testing.assert_close(got[:tokens], wanted[:tokens], rtol=1e-2, atol=8e-3)
    (bound,) = case.layer._kinds.values()
    before = bound.attention_of(wide[:, 0])
    assert before.spec.topk == wide.shape[-1] > bound.attention.spec.topk
    assert bound.attention_of(wide[:, 0]) is before and bound.attention_of(wide[:, 0, :128]) is bound.attention


def test_portable_kernels_serve_as_the_reference_does():
    with use("triton"):
        Case("selected").check([1, 3], [70, 40], 1)


def test_padding_attends_to_nothing():
    case = Case("selected")
    assert (case.run(case.step([1, 1], [130, 513], 2, 3))[2:] == 0).all()


def test_a_step_is_converted_once_for_all_layers(monkeypatch: pytest.MonkeyPatch):
    case, calls = Case("all"), []
    step = case.step([1, 20], [300, 600], 1)
    first = case.run(step)
    original = kinds.LayerKind._slots_of
    monkeypatch.setattr(kinds.LayerKind, "_slots_of", lambda *args: calls.append(args) or original(*args))
    assert torch.equal(first, case.run(step)) and not calls


def test_a_captured_step_converts_in_its_own_graph(monkeypatch: pytest.MonkeyPatch):
    """vLLM warms up and captures with one metadata object: what the warm-up made is not what replays must read."""
    case = Case("selected")
    step = case.step([1, 1], [130, 513], 2)
    case.run(step)
    (kind,) = case.layer._kinds.values()
    metadata = step.metadata[case.layer.swa_cache_layer.prefix]
    before = kind.requests(metadata)
    monkeypatch.setattr(kind._accelerator, "is_capturing", lambda: True)
    assert kind.requests(metadata) is not before and kind.requests(metadata) is kind.requests(metadata)


def test_layers_of_a_kind_share_what_serves_them():
    cases = [Case("selected"), Case("selected"), Case("window")]
    for each in cases:
        each.run(each.step([1], [9], 1))
    kind = [next(iter(each.layer._kinds.values())) for each in cases]
    assert kind[0] is kind[1] and kind[0] is not kind[2]


@pytest.mark.parametrize("kind", ["window", "selected"])
def test_layers_say_what_serves_them_in_the_metric_and_in_the_log(kind: str, monkeypatch: pytest.MonkeyPatch):
    published: list[tuple[str, Any]] = []
    logged: list[str] = []
    kinds._shared().clear()  # layers that other tests hold
    monkeypatch.setattr(kinds, "publish", lambda device, served, _: published.append((device, served)))
    monkeypatch.setattr(settings.logger, "info", lambda text, *given: logged.append(text % given))
    for case in (Case(kind), Case(kind)):
        case.run(case.step([1], [130], 1))
    (bound,) = case.layer._kinds.values()
    ((device, served),) = published  # once for layers that share it
    wanted = {"sparse_decode", "sparse_prefill"} | ({"convert_indices"} if kind == "selected" else set())
    assert {primitive for primitive, _ in served} == wanted and device == bound.attention.facts.name
    assert set(served) >= set(route_pairs(bound.attention.route_decision))
    assert {(each.primitive, each.implementation, each.device) for each in in_log(logged).served} == {
        (*pair, device) for pair in served
    }


def test_the_metric_of_layers_reaches_prometheus():
    kinds._shared().clear()
    case = Case("all")
    case.run(case.step([1], [300], 1))
    found = {(each.primitive, each.implementation) for each in in_metrics(generate_latest(REGISTRY).decode())}
    assert found >= {("sparse_decode", "reference.torch"), ("convert_indices", "reference.torch")}


def test_the_layers_of_a_kind_take_the_decision_on_graphs(monkeypatch: pytest.MonkeyPatch):
    made, decide = [], kinds.decide_route
    monkeypatch.setattr(kinds, "decide_route", lambda *given, **named: made.append(decide(*given, **named)) or made[-1])
    kinds._shared().clear()  # layers that other tests hold
    case = Case("selected")
    case.run(case.step([1], [300], 1))
    (bound,) = case.layer._kinds.values()
    assert len(made) == 1 and bound.attention.route_decision is made[0]


@pytest.mark.parametrize("route, in_place", [("auto", True), ("direct", True), ("split", False)])
def test_memory_profiling_reserves_a_workspace_only_where_prompts_are_gathered(
    route: str, in_place: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(settings.ENV_ROUTE, route)
    served, reserved = Case("selected").layer, []
    module = importlib.import_module(stock_class().__module__)
    manager = SimpleNamespace(get_simultaneous=lambda *parts: reserved.append(parts))
    monkeypatch.setattr(module, "current_workspace_manager", lambda: manager)
    q = torch.ones((3, served.padded_heads, 512), dtype=torch.bfloat16)
    output = torch.full_like(q, torch.nan)
    with set_forward_context(None, config()):
        served.forward_mqa(q, q[:, 0], torch.arange(3), output)
    assert (output == 0).all() and bool(reserved) is not in_place
    assert served._kinds  # scratch is there before memory is measured


@pytest.mark.parametrize("heads, gathers", [(4, False), (32, False), (48, True), (64, True)])
def test_prompts_of_few_heads_are_read_in_place(heads: int, gathers: bool):
    cls, caches = choice.derived(stock_class()), deepseek_v4.make_caches("window", SIZES)
    assert deepseek_v4.make_layer(cls, caches, heads).gathers_prompts is gathers


def test_lists_of_all_compressed_tokens_are_as_wide_as_what_was_prepared():
    """vLLM makes the list of 8 compressed tokens 128 wide, and a captured step finds the schedules of that width alone."""
    kinds._shared().clear()  # layers that other tests hold
    with use("triton"):
        case = Case("all")
        step = case.step([1], [300], 1)
        case.run(step)
    (bound,) = case.layer._kinds.values()
    spec, listed = bound.attention.spec, step.metadata[deepseek_v4.PREFIX].c128a_global_decode_topk_indices
    assert spec.extra_topk == listed.shape[-1]
    assert set(bound.attention._schedules) == {(1, spec.topk, spec.extra_topk)}


@pytest.mark.parametrize("heads, padded", [(4, 8), (8, 8), (16, 16), (32, 32), (48, 64), (64, 64), (128, 128)])
def test_queries_are_padded_to_what_the_writer_of_queries_can(heads: int, padded: int):
    assert choice.derived(stock_class()).get_padded_num_q_heads(heads) == padded


def test_route_split_pads_as_stock_does(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(settings.ENV_ROUTE, "split")
    assert choice.derived(stock_class()).get_padded_num_q_heads(16) == 64


@pytest.mark.parametrize("version", VERSIONS)
def test_methods_that_are_replaced_have_the_parameters_that_are_known(version: str):
    stock = stock_class(version)
    for name in ("forward_mqa", "_forward_decode", "_forward_prefill", "get_padded_num_q_heads"):
        assert list(inspect.signature(getattr(stock, name)).parameters) == list(
            inspect.signature(getattr(layer.ServedLayer, name)).parameters
        )


def asking(backend: str | None = None, **parallel: Any) -> Any:
    parallel = {"prefill_context_parallel_size": 1, "decode_context_parallel_size": 1, "use_ubatching": False} | parallel
    return SimpleNamespace(
        attention_config=SimpleNamespace(backend=None if backend is None else AttentionBackendEnum[backend]),
        parallel_config=SimpleNamespace(**parallel),
        additional_config={},
    )


@pytest.fixture(params=VERSIONS, ids=lambda version: f"V4.{version or 0}")
def select(request: pytest.FixtureRequest):
    """The model's own function with the plugin, and the class that it names without."""
    plugin.register()
    name = f"vllm.models.deepseek_v4{request.param}.nvidia.model"
    return importlib.import_module(name)._select_dsv4_attn_cls, stock_class(request.param)


def test_the_plugin_serves_where_it_is_asked_for(select: Any, monkeypatch: pytest.MonkeyPatch):
    function, stock = select
    assert function(asking()) is stock
    assert function(asking("FLASHMLA_SPARSE")) is stock
    served = function(asking("CUSTOM"))
    assert issubclass(served, stock) and issubclass(served, layer.ServedLayer) and served is choice.derived(stock)
    monkeypatch.setenv(settings.ENV_MODE, "override")
    assert function(asking()) is served and function(asking("FLASHMLA_SPARSE")) is served


def test_below_compute_capability_9_the_words_name_what_else_is_missing(select: Any, monkeypatch: pytest.MonkeyPatch):
    function, stock = select
    monkeypatch.setattr(indexer_choice, "capability", lambda: (8, 9))
    for part in ("mhc_pre_broadcast_tilelang", "o_proj", "compressor", r"mla_portable\.flash_mla"):
        with pytest.raises(InvalidArgument, match=part):
            function(asking("CUSTOM"))
    assert function(asking()) is stock  # a fork's other classes are its own affair


def test_doctor_has_the_words_of_the_refusal(select: Any, monkeypatch: pytest.MonkeyPatch):
    function, _ = select
    monkeypatch.setattr(indexer_choice, "capability", lambda: (8, 0))
    with pytest.raises(InvalidArgument) as refused:
        function(asking("CUSTOM"))
    registry = Registry(facts={"cuda": MACHINES["A100"]}, environ={}, probe=False)
    ((_, words),) = vllm_status(registry, torch.device("cuda"), environ={}).models
    for each in (choice.BELOW_SM90, choice.FORK):
        assert each in str(refused.value) and each in words


@pytest.mark.parametrize(
    "parallel, word",
    [
        ({"use_ubatching": True}, "microbatches"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size 2"),
    ],
)
def test_what_is_not_served_is_refused_in_words(parallel: dict[str, Any], word: str, monkeypatch: pytest.MonkeyPatch):
    stock = stock_class()
    with pytest.raises(InvalidArgument, match=word):
        choice.choose(stock, stock, asking("CUSTOM", **parallel))
    monkeypatch.setenv(settings.ENV_MODE, "override")
    assert choice.choose(stock, stock, asking(**parallel)) is stock


def test_a_module_without_the_class_is_left_alone_in_words(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    warned: list[str] = []
    monkeypatch.setattr(settings.logger, "warning", lambda text, *given: warned.append(text % given))
    module = types.ModuleType("vllm.models.deepseek_v4.nvidia.model")
    choice.replace_selection(module)
    assert len(warned) == 1 and choice.SELECT in warned[0] and choice.STOCK in warned[0]


def test_the_program_that_compares_layers_on_a_gpu_finds_ours_right(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(settings.ENV_ROUTE, "direct")
    assert v4_layer.main(["--cpu", "--heads", "8"]) == 0
    assert "6 rows, 0 wrong" in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["a key less", "NaN"])
def test_the_program_calls_a_wrong_layer_wrong(
    fault: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv(settings.ENV_ROUTE, "direct")
    forward = SlotAttention.forward

    def spoiled(self: SlotAttention, q: torch.Tensor, *args: Any, out: torch.Tensor, **named: Any) -> Any:
        if fault == "a key less":
            named["lengths"] = (named["lengths"] - 1).clamp(min=0)
        found = forward(self, q, *args, out=out, **named)
        if fault == "NaN":
            out[0, 0, 0] = torch.nan
        return found

    monkeypatch.setattr(SlotAttention, "forward", spoiled)
    file = tmp_path / "rows.json"
    assert v4_layer.main(["--cpu", "--heads", "8", "--kinds", "window", "--seed", "7", "--json", str(file)]) == 1
    assert "2 rows, 2 wrong" in capsys.readouterr().out
    rows = json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert [(row["kind"], row["heads"], row["right"], row["stock_us"]) for row in rows] == [("window", 8, False, None)] * 2


def test_the_seed_of_the_program_decides_about_all_that_is_drawn():
    rows = [
        v4_layer.compare(
            deepseek_v4.make_caches("selected", SIZES, seed=s), 8, v4_layer.SMALL[0], config(), stock=False, seed=s
        )
        for s in (3, 3, 4)
    ]
    assert rows[0].ours_error == rows[1].ours_error != rows[2].ours_error


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--kinds", "window,some"], "--kinds some: expected some of window, selected, all"),
        (["--heads", "8,x,256"], "--heads x,256: expected numbers from 1 to 128"),
        ([], "needs a GPU; --cpu"),
    ],
)
def test_the_program_refuses_wrong_arguments_in_words(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        v4_layer.main(words)
    assert ended.value.code == 2 and expected in capsys.readouterr().err
