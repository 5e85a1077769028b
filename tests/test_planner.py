# SPDX-License-Identifier: Apache-2.0
"""The planner by example: chunks, padding, what is copied and when, what is refused, the staging ring."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mla_portable.contracts import Batch, InvalidArgument, StepPlan
from mla_portable.kit.split_kv import SPLIT_KV
from mla_portable.planner import Planner, PlannerConfig
from mla_portable.planner.staging import StagingRing
from mla_portable_common.flash_mla.tile_schedules import FLASHMLA_TILES, TileSchedule, tile_schedule

CONFIG = PlannerConfig(
    device="cpu",
    route="split",
    num_heads=16,
    topk=128,
    max_num_reqs=16,
    max_num_tokens=64,
    max_model_len=40,
    prefill_workspace_tokens=44,
)
TILES = replace(
    CONFIG,
    route="fused",
    topk=2048,
    max_num_reqs=512,
    max_num_tokens=1024,
    schedule_kind=FLASHMLA_TILES,
    num_sms=132,
    arch="sm90",
)


DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def batch_of(
    query_lens: list[int],
    seq_lens: list[int] | None = None,
    *,
    num_padded_tokens: int | None = None,
    device: str = "cpu",
) -> Batch:
    seq_lens = [n + 3 for n in query_lens] if seq_lens is None else seq_lens
    starts = np.zeros(len(query_lens) + 1, dtype=np.int32)
    np.cumsum(query_lens, out=starts[1:])
    table = torch.arange(len(query_lens) * 4, dtype=torch.int32, device=device).view(-1, 4)
    return Batch(starts, np.array(seq_lens, dtype=np.int32), table, num_padded_tokens)


def test_every_tensor_of_a_plan_keeps_its_address():
    planner = Planner(CONFIG)

    def addresses(plan: StepPlan) -> list[int]:
        assert plan.prefill_request_ids is not None
        assert plan.prefill_workspace_starts is not None
        first = plan.prefill_chunks[0]
        tensors = (plan.req_id_per_token, plan.prefill_request_ids, plan.prefill_workspace_starts, first.seq_lens)
        return [t.data_ptr() for t in tensors]

    first = addresses(planner.plan(batch_of([1, 1, 5])))
    assert addresses(planner.plan(batch_of([1] * 7 + [20, 30]))) == first
    assert all(address % 256 == first[0] % 256 for address in first)


def copies_of(planner: Planner, batch: Batch) -> int:
    before = planner.num_copies
    planner.plan(batch)
    return planner.num_copies - before


def test_a_decode_batch_like_the_last_one_copies_nothing():
    planner = Planner(CONFIG)
    assert copies_of(planner, batch_of([1] * 5)) == 1
    assert copies_of(planner, batch_of([1] * 5, [30] * 5)) == 0
    assert copies_of(planner, batch_of([1] * 5, num_padded_tokens=9)) == 0
    assert copies_of(planner, batch_of([1] * 4)) == 1
    assert copies_of(planner, batch_of([1, 1, 9])) == 1
    assert copies_of(planner, batch_of([1] * 4)) == 1
    assert copies_of(planner, batch_of([])) == 1, "old ids are zeroed"
    assert copies_of(planner, batch_of([])) == 0, "nothing to say"


def refuse_read_back(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make whatever reads a tensor on the host, or waits for the device, raise."""
    if device == "cuda":
        monkeypatch.setattr(torch.cuda, "synchronize", read_back)
        torch.cuda.set_sync_debug_mode("error")
        return
    for name in ("item", "tolist", "cpu", "numpy", "__int__", "__bool__", "__index__", "__iter__", "__array__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, read_back)


def read_back(*args: object, **kwargs: object) -> None:
    raise AssertionError("a tensor was read, or the device waited for")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("route", ["fused", "split", "direct", "upconvert"])
def test_planning_reads_nothing_back(route: str, device: str, monkeypatch: pytest.MonkeyPatch):
    planners = [Planner(replace(config, route=route, device=device)) for config in (CONFIG, TILES)]
    batches = [batch_of(lens, device=device) for lens in ([1] * 9, [1, 1, 5, 6], [7], [], [0, 1])]
    for planner in planners:
        planner.plan(batches[3])  # the first plan allocates
    refuse_read_back(device, monkeypatch)
    try:
        for planner in planners:
            for batch in batches * 3:
                planner.plan(batch)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("device", DEVICES)
def test_back_to_back_plans_each_arrive(device: str):
    """Nothing waits between these steps, so each copy may still be under way when the next plan is made."""
    planner = Planner(replace(CONFIG, device=device))
    seen: list[torch.Tensor] = []
    lens = [[1] * (1 + step % 7) + [2 + step % 5, 3] for step in range(60)]
    for query_lens in lens:
        plan = planner.plan(batch_of(query_lens, device=device))
        assert plan.prefill_request_ids is not None
        seen.append(torch.stack((plan.req_id_per_token, plan.prefill_request_ids)))  # in stream order, before the next copy
    for query_lens, (ids, prefill_ids) in zip(lens, seen, strict=True):
        owners = [request for request, n in enumerate(query_lens) for _ in range(n)]
        assert ids.tolist() == owners
        assert prefill_ids.tolist() == [max(owner - (len(query_lens) - 2), -1) for owner in owners]


def test_inference_mode_may_come_and_go():
    with torch.inference_mode():
        planner = Planner(replace(CONFIG, schedule_kind=SPLIT_KV, num_sms=8))
        planner.plan(batch_of([1, 1, 4]))
    plan = planner.plan(batch_of([1] * 3))
    assert plan.req_id_per_token.tolist() == [0, 1, 2]
    with torch.inference_mode():
        assert planner.plan(batch_of([2])).req_id_per_token.tolist() == [0, 0]


def vars_of(query_lens: list[int], seq_lens: list[int] | None = None) -> dict[str, Any]:
    batch = batch_of(query_lens, seq_lens)
    return {name: getattr(batch, name) for name in ("query_start_loc", "seq_lens", "block_table")}


INT32 = np.int32
BAD = [
    ("query_start_loc", {"query_start_loc": torch.tensor([0, 1, 2])}, "got Tensor, expected a numpy array"),
    (
        "query_start_loc",
        {"query_start_loc": np.ma.masked_array([0, 1, 2], dtype=INT32)},
        "got MaskedArray, expected a numpy array",
    ),
    ("query_start_loc", {"query_start_loc": np.array([0, 1, 2])}, r"got int64 of shape \[3\], expected int32"),
    ("query_start_loc", {"query_start_loc": np.zeros((3, 1), INT32)}, r"got int32 of shape \[3, 1\], expected int32 \[R"),
    ("query_start_loc", {"query_start_loc": np.array([1, 2, 3], INT32)}, "first entry 1, expected 0"),
    ("query_start_loc", {"query_start_loc": np.array([0, 3, 2], INT32)}, "got 3 query tokens for request 0, .* last one, 2"),
    ("query_start_loc", {"query_start_loc": np.array([0, -1, 2], INT32)}, "got -1 query tokens for request 0"),
    (
        "query_start_loc",
        {"query_start_loc": np.array([0, 0, -2], INT32)},
        r"last entry -2, expected 0 to max_num_tokens \(64\)",
    ),
    ("query_start_loc", {"query_start_loc": np.array([0, 30, 65], INT32)}, r"last entry 65, .*max_num_tokens \(64\).*Raise"),
    ("seq_lens", {"seq_lens": np.array([4.0, 4.0])}, r"got float64 of shape \[2\], expected int32 \[R\]"),
    ("seq_lens", {"seq_lens": np.array([4], INT32)}, r"got shape \[1\], expected one entry per request, 2"),
    ("seq_lens", {"query_start_loc": np.zeros(0, INT32)}, "query_start_loc has shape"),
    ("seq_lens", {"seq_lens": np.array([4, 0], INT32)}, "got 0 for request 1, expected its 1 query tokens to"),
    ("seq_lens", {"seq_lens": np.array([-(2**31), 4], INT32)}, "got -2147483648 for request 0"),
    ("seq_lens", {"seq_lens": np.array([4, 41], INT32)}, r"got 41 for request 1, expected .* max_model_len \(40\)"),
    ("num_padded_tokens", {"num_padded_tokens": 1}, r"got 1, expected the batch's 2 tokens to max_num_tokens \(64\)"),
    ("num_padded_tokens", {"num_padded_tokens": 65}, "got 65, expected"),
    ("block_table", {"block_table": np.zeros((2, 4), INT32)}, "got ndarray, expected a dense tensor"),
    ("block_table", {"block_table": torch.zeros(2, 4)}, r"got torch.float32 of shape \[2, 4\], expected torch.int32"),
    ("block_table", {"block_table": torch.zeros(1, 4, dtype=torch.int32)}, "with at least 2 rows"),
    ("block_table", {"block_table": torch.zeros(2, 4, dtype=torch.int32, device="meta")}, "on meta, expected .* device, cpu"),
    ("seq_lens_device", {"seq_lens_device": torch.zeros(1, dtype=torch.int32)}, "with at least 2 rows"),
    ("num_padded_tokens", {"num_padded_tokens": 8.0}, "got float 8.0, expected the batch's 2 tokens"),
    ("block_table", {"block_table": torch.zeros(4, 2, dtype=torch.int32).T}, r"got strides \[1, 2\].* block_table.contiguous"),
    ("block_table", {"block_table": torch.zeros(2, 4, dtype=torch.int32).to_sparse()}, "expected a dense tensor"),
    ("seq_lens_device", {"seq_lens_device": torch.zeros(4, dtype=torch.int32)[::2]}, "seq_lens_device.contiguous"),
    # a batch of its own instead of two decodes: a mixed one, one with a dip, one of too many requests
    ("seq_lens", vars_of([1, 6], [0, 6]), "got 0 for request 0"),
    ("seq_lens", vars_of([1, 6], [9, 41]), "got 41 for request 1"),
    ("seq_lens", vars_of([1, 6], [1, -7]), "got -7"),
    ("query_start_loc", vars_of([2, 2, 2]) | {"query_start_loc": np.array([0, 2, 1, 2], INT32)}, "got -1 .* for request 1"),
    ("seq_lens", vars_of([1] * 17), r"got 17 requests, expected at most max_num_reqs \(16\)"),
]


@pytest.mark.parametrize(("argument", "fields", "message"), BAD, ids=[f"{i}-{b[0]}" for i, b in enumerate(BAD)])
def test_a_bad_batch_is_refused_and_changes_nothing(argument: str, fields: dict, message: str):
    planner = Planner(CONFIG)
    last = planner.plan(batch_of([1] * 5))
    with pytest.raises(InvalidArgument, match=f"Planner.plan: {argument}: .*{message}"):
        planner.plan(replace(batch_of([1, 1]), **fields))
    assert last.req_id_per_token.tolist() == [0, 1, 2, 3, 4]
    assert copies_of(planner, batch_of([1] * 5)) == 0


@pytest.mark.parametrize("batch", [None, (1, 2), "batch"])
def test_what_is_no_batch_is_refused(batch: Any):
    with pytest.raises(InvalidArgument, match=r"Planner.plan: batch: .*mla_portable.contracts.Batch"):
        Planner(CONFIG).plan(batch)


@pytest.mark.parametrize(("query_lens", "seq_lens"), [([1, 1], [9, 33]), ([1, 6], [9, 33]), ([6, 1], [33, 9])])
def test_a_sequence_longer_than_its_row_of_the_block_table_is_refused(query_lens: list[int], seq_lens: list[int]):
    planner = Planner(replace(CONFIG, block_size=8))  # four columns
    wrong = seq_lens.index(33)
    with pytest.raises(InvalidArgument, match=f"seq_lens: got 33 for request {wrong}, expected at most 32, .*more columns"):
        planner.plan(batch_of(query_lens, seq_lens))
    planner.plan(batch_of(query_lens, [min(n, 32) for n in seq_lens]))
    planner.plan(batch_of([0, *query_lens], [40, 9, 9]))  # without query tokens nothing is read
    no_columns = replace(batch_of([1, 1]), block_table=torch.zeros(2, 0, dtype=torch.int32))
    with pytest.raises(InvalidArgument, match="expected at most 0"):
        planner.plan(no_columns)
    Planner(CONFIG).plan(batch_of(query_lens, seq_lens))  # unknown block size


def test_a_plan_knows_whether_its_numbers_were_overwritten():
    planner = Planner(CONFIG)

    def is_overtaken(plan: StepPlan) -> bool:
        assert plan.counter is not None
        return plan.counter.count != plan.generation

    mixed = planner.plan(batch_of([1, 1, 9]))
    assert not is_overtaken(mixed)
    decodes = planner.plan(batch_of([1] * 5))
    assert is_overtaken(mixed) and not is_overtaken(decodes)
    again = planner.plan(batch_of([1] * 5, [30] * 5, num_padded_tokens=9))
    assert not is_overtaken(decodes) and not is_overtaken(again), "the same request ids"
    with pytest.raises(InvalidArgument):
        planner.plan(batch_of([1] * 17))
    assert not is_overtaken(decodes), "a refused batch writes nothing"
    Planner(CONFIG).plan(batch_of([1] * 4))
    assert not is_overtaken(decodes), "another planner has buffers of its own"
    planner.plan(batch_of([1] * 4))
    assert is_overtaken(decodes) and is_overtaken(again)


@pytest.mark.parametrize("config", [CONFIG, TILES], ids=["split", "tiles"])
def test_an_invalidated_planner_writes_everything_again(config: PlannerConfig):
    planner = Planner(config)
    planner.invalidate()
    planner.plan(batch_of([1] * 9))
    plan = planner.plan(batch_of([1] * 5))
    lost = torch.full_like(planner.plan(batch_of([1] * 5)).req_id_per_token, 7)
    whole = plan.req_id_per_token.as_strided((config.max_num_tokens,), (1,))
    whole.fill_(7)
    if plan.decode_schedule is not None:
        plan.decode_schedule.tile_scheduler_metadata.fill_(7)
    assert planner.plan(batch_of([1] * 5)).req_id_per_token.equal(lost), "the planner cannot notice"
    planner.invalidate()
    assert plan.counter is not None and plan.counter.count != plan.generation
    plan = planner.plan(batch_of([1] * 5))
    assert whole.tolist() == [0, 1, 2, 3, 4] + [0] * (config.max_num_tokens - 5)
    if isinstance(plan.decode_schedule, TileSchedule):
        expected = tile_schedule([2048] * 5, num_sm_parts=132)
        assert plan.decode_schedule.tile_scheduler_metadata.tolist() == expected.metadata.tolist()
    assert copies_of(planner, batch_of([1] * 5)) == 0


def test_buffers_that_outlive_a_step_are_allocated_by_the_first_plan(monkeypatch: pytest.MonkeyPatch):
    made: list[tuple[int, ...]] = []
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: made.append(args) or zeros(*args, **kwargs))
    planner = Planner(CONFIG)
    assert (made, planner.num_copies) == ([], 0)
    planner.plan(batch_of([1]))
    assert made
    made.clear()
    planner.plan(batch_of([1, 9]))
    assert made == []


class Stream:
    """A stream that runs nothing until told to: its fences pass in order, and it knows who waited."""

    def __init__(self) -> None:
        self.recorded = self.passed = self.waits = 0

    def make_fence(self) -> StreamFence:
        return StreamFence(self)


class StreamFence:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.place = stream, 0

    def record(self) -> None:
        self.stream.recorded += 1
        self.place = self.stream.recorded

    def query(self) -> bool:
        return self.place <= self.stream.passed

    def synchronize(self) -> None:
        self.stream.waits += 1
        self.stream.passed = max(self.stream.passed, self.place)


def test_no_staging_buffer_is_rewritten_under_a_copy():
    stream, rng = Stream(), np.random.default_rng(0)
    target = torch.zeros(4, dtype=torch.int32)
    ring = StagingRing(target, depth=2, limit=6, make_fence=stream.make_fence)
    under_way: list[tuple[int, Any]] = []  # (fence number, buffer)
    for _ in range(2000):
        buffer = ring.take()
        under_way = [(place, b) for place, b in under_way if place > stream.passed]
        assert all(b is not buffer for _, b in under_way)
        ring.send(buffer, 4)
        under_way.append((stream.recorded, buffer))
        stream.passed = max(stream.passed, stream.recorded - int(rng.integers(0, 12)))
    assert len(ring) == 6
    assert stream.waits > 0, "at its limit the ring waits, for the oldest copy alone"


def test_the_ring_grows_rather_than_waits():
    stream = Stream()
    target = torch.zeros(4, dtype=torch.int32)
    ring = StagingRing(target, depth=2, limit=8, make_fence=stream.make_fence)
    for _ in range(8):
        ring.send(ring.take(), 4)
    assert (len(ring), stream.waits) == (8, 0)
    ring.take()
    assert stream.waits == 1
    assert stream.passed == 1, "waited for the oldest"


def test_a_quick_device_needs_no_more_than_the_first_buffers():
    stream = Stream()
    target = torch.zeros(4, dtype=torch.int32)
    ring = StagingRing(target, depth=2, limit=8, make_fence=stream.make_fence)
    for step in range(50):
        buffer = ring.take()
        buffer.words[:] = step
        ring.send(buffer, 3)
        stream.passed = stream.recorded
    assert (len(ring), stream.waits, ring.num_copies) == (2, 0, 50)
    assert target.tolist() == [49, 49, 49, 0]
