# SPDX-License-Identifier: Apache-2.0
"""The GPU kit's shadow mode: which differences are recorded, for which tokens, and when."""

from __future__ import annotations

import json
import math
from pathlib import Path

import fake_stock
import pytest
import shadow
import torch
from vllm_engine import attend, check_step, make_engine, make_step

from mla_portable.contracts import InvalidArgument
from mla_portable.engines.vllm import compat
from mla_portable.engines.vllm.backend import MLAPortableBackend
from mla_portable.engines.vllm.impl import MLAPortableImpl


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    file = tmp_path / "shadow.jsonl"
    for name in ("get_impl_cls", "get_builder_cls"):  # put back afterwards
        monkeypatch.setattr(MLAPortableBackend, name, staticmethod(getattr(MLAPortableBackend, name)))
    shadow.install(file, "fake_stock.StockBackend")
    monkeypatch.setitem(fake_stock.ERROR, "relative", 0.0)
    return lambda: [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.parametrize("error", [0.0, 0.05])
def test_each_layer_and_step_is_recorded(error: float, records, caplog: pytest.LogCaptureFixture):
    fake_stock.ERROR["relative"] = error
    engine = make_engine("auto")
    for seed in range(2):
        check_step(engine, [1, 1, 9], [100, 64, 9], padded_tokens=14, padded_reqs=5, seed=seed)
    found = records()
    wanted = [(n, engine.layer.layer_name, "forward_mqa", 11) for n in (1, 2)]
    assert [(r["step"], r["layer"], r["method"], r["rows"]) for r in found] == wanted
    for record in found:
        assert record["relative"] == pytest.approx(error / (1 + error), abs=4e-3)
        assert record["relative"] <= record["worst_row"] < record["relative"] + 4e-3
        assert record["max_abs"] > (0.01 if error else 0)
    warned = [r for r in caplog.records if r.levelname == "WARNING" and "forward_mqa of layer" in r.message]
    assert bool(warned) == (error > shadow.LIMIT)


def test_what_goes_on_is_ours(records):
    fake_stock.ERROR["relative"] = 9.0
    engine = make_engine("auto")
    step = make_step(engine, [1, 5], [100, 5])
    metadata = engine.builder.build(0, step.common)
    out, _ = attend(engine, metadata, step.q)
    metadata.shadow = None
    again, _ = attend(engine, metadata, step.q)
    assert torch.equal(out, again)
    assert len(records()) == 1


def test_a_replayed_graph_is_recorded_when_the_next_step_is_built(records, monkeypatch: pytest.MonkeyPatch):
    """A replay updates the numbers on the device without Python running: `build` finds them."""
    engine = make_engine("auto")
    step = make_step(engine, [1, 1], [100, 64])
    metadata = engine.builder.build(0, step.common)
    attend(engine, metadata, step.q)
    engine.builder.build(0, step.common)
    assert len(records()) == 1
    (numbers,) = engine.impl.recorder._numbers.values()
    numbers.copy_(torch.tensor([2.0, 2.0, 0.25, 0.5, 1.0]))  # as a replay leaves them
    engine.builder.build(0, step.common)
    assert [(r["step"], r["relative"]) for r in records()] == [(1, pytest.approx(0.0, abs=4e-3)), (2, 0.25)]
    engine.builder.build(0, step.common)
    assert len(records()) == 2


def test_stock_hears_of_all_that_vllm_says(records, monkeypatch: pytest.MonkeyPatch):
    """0.33's stock implementation waits for an event that `record_logical_topk_ready` records."""
    heard: list[tuple] = []

    def hook(name: str, *, both: bool = True):
        def call(self, *arguments, **named):
            heard.append((type(self).__name__, name, *arguments, *named.values()))

        for owner in (fake_stock.StockImpl, MLAPortableImpl)[: 2 if both else 1]:
            monkeypatch.setattr(owner, name, call, raising=False)

    for name in ("prepare_for_batch", "reserve_workspace", "a_hook_of_a_later_version"):
        hook(name)
    hook("record_logical_topk_ready", both=False)  # ours has one
    hook("process_weights_after_loading", both=False)
    hook("only_stock_has_this", both=False)
    for name in shadow.COMPUTING - {"forward_mqa"}:
        hook(name, both=False)
    engine = make_engine("auto")
    metadata = engine.builder.build(0, make_step(engine, [1, 1], [100, 64]).common)
    impl = engine.impl
    heard.clear()
    impl.process_weights_after_loading(torch.bfloat16)
    impl.reserve_workspace()
    impl.record_logical_topk_ready()
    impl.prepare_for_batch(None)
    impl.prepare_for_batch(metadata)
    impl.a_hook_of_a_later_version(attn_metadata=metadata)
    ours, stock = "ShadowImpl", "StockImpl"
    assert heard == [
        (stock, "process_weights_after_loading", torch.bfloat16),
        (ours, "reserve_workspace"),
        (stock, "reserve_workspace"),
        (stock, "record_logical_topk_ready"),
        (ours, "prepare_for_batch", None),
        (stock, "prepare_for_batch", None),
        (ours, "prepare_for_batch", metadata),
        (stock, "prepare_for_batch", metadata.shadow),
        (ours, "a_hook_of_a_later_version", metadata),
        (stock, "a_hook_of_a_later_version", metadata.shadow),
    ]
    assert not hasattr(impl, "only_stock_has_this")
    impl.topk_indices_buffer = other = engine.topk.clone()
    assert impl.topk_indices_buffer is other and impl._beside.topk_indices_buffer is other


def test_the_cache_is_written_once(records, monkeypatch: pytest.MonkeyPatch):
    wrote: list[str] = []
    monkeypatch.setattr(fake_stock.StockImpl, "do_kv_cache_update", lambda self, *given: wrote.append("stock"))
    engine = make_engine("auto")
    make_step(engine, [1, 1], [100, 64])
    assert not wrote


def test_difference_counts_attending_tokens_alone():
    theirs = torch.tensor([[[3.0, 4.0]], [[1.0, 0.0]], [[9.0, 9.0]]])
    ours = torch.tensor([[[3.0, 4.5]], [[0.0, 0.0]], [[math.nan, 0.0]]])
    topk = torch.tensor([[-1, 0], [2, 1], [-1, -1]], dtype=torch.int32)
    rows, relative, worst, largest = shadow.difference(ours, theirs, topk).tolist()
    assert rows == 2
    assert relative == pytest.approx(math.sqrt(1.25 / 26))
    assert (worst, largest) == (1.0, 1.0)
    assert shadow.difference(ours, theirs, torch.full_like(topk, -1)).tolist() == [0.0, 0.0, 0.0, 0.0]
    ours[0, 0, 0] = math.nan
    assert math.isnan(shadow.difference(ours, theirs, topk).tolist()[1])


def test_a_long_step_is_compared_in_pieces(monkeypatch: pytest.MonkeyPatch):
    ours, theirs = torch.randn(7, 2, 4), torch.randn(7, 2, 4)
    topk = torch.tensor([[0]] * 6 + [[-1]], dtype=torch.int32)
    whole = shadow.difference(ours, theirs, topk)
    monkeypatch.setattr(shadow, "_ROWS_AT_ONCE", 3)
    assert torch.allclose(shadow.difference(ours, theirs, topk), whole)


def test_the_plugin_knows_nothing_of_it():
    engine = make_engine("auto")
    assert type(engine.impl) is MLAPortableBackend.get_impl_cls() and not issubclass(type(engine.impl), shadow.ShadowImpl)


def test_what_cannot_be_compared_is_refused(records, monkeypatch: pytest.MonkeyPatch):
    engine = make_engine("auto")
    given = engine.layer.get_kv_cache_spec(engine.config), [engine.layer.layer_name], engine.config, torch.device("cpu")
    builder = MLAPortableBackend.get_builder_cls()
    monkeypatch.setattr(compat, "context_ranks", lambda config: 2)
    with pytest.raises(InvalidArgument, match="decode context parallelism 2, expected 1"):
        builder(*given)
