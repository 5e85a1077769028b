# SPDX-License-Identifier: Apache-2.0
"""The planner against a slow statement of what a plan means, token by token, on random sequences of random batches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_portable.contracts import Batch, StepPlan
from mla_portable.kit.split_kv import SPLIT_KV
from mla_portable.planner import Planner, PlannerConfig
from mla_portable.times.prefill import PrefillTimes
from mla_portable.times.rows import Times

MAX_MODEL_LEN = 32
MAX_REQS = 12
MAX_TOKENS = 100
SLOPES = PrefillTimes(Times({2: 6.0, 100: 300.0}), Times({2: 2.0, 4: 4.0}), Times({1: 1.0, 50: 50.0}))


@dataclass
class Meaning:
    """What a plan must say, derived one request and one token at a time."""

    decode_tokens: int = 0
    query_len: int = 1
    prefills: list[int] = field(default_factory=list)  # requests
    request_of: list[int] = field(default_factory=list)  # per row
    prefill_of: list[int] = field(default_factory=list)  # per row
    starts: list[int] = field(default_factory=list)  # per prefill
    chunks: list[list[int]] = field(default_factory=list)  # requests of each chunk that is gathered


def meaning_of(config: PlannerConfig, query_lens: list[int], seq_lens: list[int], padded: int) -> Meaning:
    meaning = Meaning()
    for request, query_len in enumerate(query_lens):
        for _ in range(query_len):
            meaning.request_of.append(request)
    num_tokens = len(meaning.request_of)
    meaning.request_of += [0] * (padded - num_tokens)

    busy = [request for request, query_len in enumerate(query_lens) if query_len > 0]
    decodes: list[int] = []
    for request in busy:
        if query_lens[request] != query_lens[busy[0]]:
            break
        decodes.append(request)
    most = config.few_tokens if config.route in ("direct", "split") else 0
    few = sum(query_lens[request] for request in decodes) <= most
    if config.route == "upconvert" or (decodes and query_lens[decodes[0]] > config.decode_threshold and not few):
        decodes = []
    behind = busy[len(decodes) :]
    if behind:
        meaning.prefills = list(range(behind[0], behind[-1] + 1))
    if decodes:
        meaning.query_len = query_lens[decodes[0]]
    meaning.decode_tokens = sum(query_lens[request] for request in decodes)

    if config.route == "fused":
        if behind or padded % meaning.query_len:
            meaning.query_len = 1
        meaning.decode_tokens = padded
        meaning.prefills = []
    elif config.route != "upconvert" and not behind and padded % meaning.query_len == 0:
        meaning.decode_tokens = padded

    prefill_number = {request: i for i, request in enumerate(meaning.prefills)}
    for row, request in enumerate(meaning.request_of):
        real = row < num_tokens and row >= meaning.decode_tokens
        meaning.prefill_of.append(prefill_number[request] if real else -1)

    room = 0
    for request in meaning.prefills:
        if not meaning.chunks or room < seq_lens[request]:
            meaning.chunks.append([])
            room = config.workspace_tokens
        meaning.chunks[-1].append(request)
        meaning.starts.append(config.workspace_tokens - room)
        room -= seq_lens[request]
    for chunk in list(meaning.chunks):
        tokens, rows = (sum(lens[request] for request in chunk) for lens in (query_lens, seq_lens))
        if config.prefill_times is None:
            gathered = tokens > 0
        else:  # as SLOPES has it: a row costs 1, a token saves 2
            gathered = rows <= config.workspace_tokens and tokens >= 2 and rows < 2 * tokens
        if not gathered:
            meaning.chunks.remove(chunk)
            rows_of_chunk = [row for row, request in enumerate(meaning.request_of[:num_tokens]) if request in chunk]
            for row in rows_of_chunk:
                meaning.prefill_of[row] = -1
    return meaning


def assert_means(plan: StepPlan, config: PlannerConfig, batch: Batch, query_lens: list[int], seq_lens: list[int]):
    num_tokens, padded = sum(query_lens), plan.num_padded_tokens
    meaning = meaning_of(config, query_lens, seq_lens, padded)
    assert plan.route == config.route
    assert (plan.num_reqs, plan.num_tokens) == (len(query_lens), num_tokens)
    assert padded == (num_tokens if batch.num_padded_tokens is None else batch.num_padded_tokens)
    assert (plan.num_decode_tokens, plan.decode_query_len) == (meaning.decode_tokens, meaning.query_len)
    assert plan.num_decodes * plan.decode_query_len == plan.num_decode_tokens
    assert plan.num_prefills == len(meaning.prefills)
    assert plan.num_prefill_tokens == (sum(query_lens[r] for r in meaning.prefills))
    assert plan.block_table.equal(batch.block_table[: len(query_lens)])

    assert plan.req_id_per_token.dtype == torch.int32
    assert plan.req_id_per_token.tolist() == meaning.request_of
    whole = plan.req_id_per_token.as_strided((MAX_TOKENS,), (1,))
    assert not whole[num_tokens:].any(), "zero past the batch, for graphs captured with more rows"
    if not config.has_workspace or not meaning.chunks:
        assert plan.prefill_request_ids is plan.prefill_workspace_starts is None
        assert plan.prefill_chunks == ()
        return
    assert plan.prefill_request_ids is not None
    assert plan.prefill_workspace_starts is not None
    assert plan.prefill_request_ids.tolist() == meaning.prefill_of
    assert plan.prefill_workspace_starts.tolist() == meaning.starts
    assert plan.prefill_request_ids.dtype == plan.prefill_workspace_starts.dtype == torch.int32

    first_token = np.concatenate([[0], np.cumsum(query_lens)]).tolist()
    assert [list(range(c.requests.start, c.requests.stop)) for c in plan.prefill_chunks] == meaning.chunks
    served = [0] * num_tokens
    for token in range(num_tokens):
        served[token] += token < plan.num_decode_tokens or (config.prefill_times is not None and meaning.prefill_of[token] < 0)
    for chunk, members in zip(plan.prefill_chunks, meaning.chunks, strict=True):
        assert (chunk.tokens.start, chunk.tokens.stop) == (first_token[members[0]], first_token[members[-1] + 1])
        for token in range(chunk.tokens.start, chunk.tokens.stop):
            served[token] += 1
        assert chunk.block_table.equal(batch.block_table[members[0] : members[-1] + 1])
        assert chunk.seq_lens.tolist() == [seq_lens[r] for r in members]
        owner = [-1] * config.workspace_tokens
        for request, start in zip(members, chunk.workspace_starts.tolist(), strict=True):
            for row in range(start, start + seq_lens[request]):
                assert owner[row] == -1, f"workspace row {row} belongs to requests {owner[row]} and {request}"
                owner[row] = request
        assert chunk.workspace_rows == sum(1 for o in owner if o >= 0)
        assert all(o >= 0 for o in owner[: chunk.workspace_rows])
    assert served == [1] * num_tokens, "every token is served by exactly one part"


class LaggingFence:
    """Passed only when asked for the second time, so copies stay in flight for a while."""

    def __init__(self) -> None:
        self.asked = 0

    def record(self) -> None:
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.asked > 1

    def synchronize(self) -> None:
        raise AssertionError("a ring that may still grow must not wait")


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(query tokens, sequence length) of each request."""
    query_len = st.integers(0, 7)
    kind = draw(st.sampled_from(["any", "uniform", "decodes then prefills", "single tokens", "full length"]))
    if kind == "any":
        lens = draw(st.lists(query_len, max_size=MAX_REQS))
    elif kind == "uniform":
        lens = [draw(st.integers(1, 3))] * draw(st.integers(0, MAX_REQS)) + [0] * draw(st.integers(0, 3))
    elif kind == "single tokens":
        lens = draw(st.lists(st.integers(0, 1), max_size=MAX_REQS))
    elif kind == "full length":
        return [(draw(st.integers(2, 7)), MAX_MODEL_LEN) for _ in range(draw(st.integers(1, MAX_REQS)))]
    else:
        lens = [draw(st.integers(1, 3))] * draw(st.integers(0, 6)) + draw(st.lists(query_len, max_size=6))
    lens = lens[:MAX_REQS]
    return [(n, draw(st.integers(n, MAX_MODEL_LEN))) for n in lens]


step = st.tuples(requests(), st.none() | st.integers(0, 6), st.booleans(), st.integers(0, 2))


@pytest.mark.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
@pytest.mark.parametrize("lag", [False, True], ids=["no_lag", "lag"])
@pytest.mark.parametrize("route", ["fused", "split", "split by times", "direct", "upconvert"])
@settings(max_examples=140, deadline=None, database=None)
@given(
    steps=st.lists(step, min_size=2, max_size=5),
    threshold=st.integers(1, 3),
    few_tokens=st.integers(0, 9),
    workspace=st.integers(MAX_MODEL_LEN, 3 * MAX_MODEL_LEN),
)
def test_a_plan_means_what_the_slow_statement_says(
    route: str, lag: bool, device: str, steps: list, threshold: int, few_tokens: int, workspace: int
):
    by_times = route == "split by times"
    config = PlannerConfig(
        device=device,
        route=route.partition(" ")[0],
        num_heads=16,
        topk=64,
        max_num_reqs=MAX_REQS,
        max_num_tokens=MAX_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        prefill_workspace_tokens=workspace // 2 if by_times else workspace,
        prefill_times=SLOPES if by_times else None,
        decode_threshold=threshold,
        few_tokens=few_tokens,
        schedule_kind=SPLIT_KV,
        num_sms=8,
    )
    planner = Planner(config, make_fence=LaggingFence if lag else None)
    addresses: set[int] = set()
    copies = 0
    for members, padding, with_seq_lens, spare_rows in steps:
        query_lens, seq_lens = [q for q, _ in members], [n for _, n in members]
        host_lens = np.array(seq_lens, dtype=np.int32)
        batch = Batch(
            query_start_loc=np.concatenate([[0], np.cumsum(query_lens, dtype=np.int32)]).astype(np.int32),
            seq_lens=host_lens,
            block_table=torch.randint(0, 99, (len(members) + spare_rows, 3), dtype=torch.int32, device=device),
            num_padded_tokens=None if padding is None else sum(query_lens) + padding,
            seq_lens_device=torch.from_numpy(np.append(host_lens, [7] * spare_rows).astype(np.int32)).to(device)
            if with_seq_lens
            else None,
        )
        plan = planner.plan(batch)
        assert_means(plan, config, batch, query_lens, seq_lens)
        assert (plan.seq_lens is not None) == with_seq_lens
        if plan.seq_lens is not None and batch.seq_lens_device is not None:
            assert plan.seq_lens.tolist() == seq_lens
            assert plan.seq_lens.untyped_storage().data_ptr() == batch.seq_lens_device.untyped_storage().data_ptr()
        assert (plan.decode_schedule is None) == (plan.num_decode_tokens == 0)
        if plan.decode_schedule is not None:
            assert plan.decode_schedule.num_rows == plan.num_decode_tokens
        if plan.num_padded_tokens:
            addresses.add(plan.req_id_per_token.data_ptr())
        assert planner.num_copies <= copies + 1
        copies = planner.num_copies
        wider = replace(batch, num_padded_tokens=plan.num_padded_tokens + 1)
        assert_means(planner.plan(wider), config, wider, query_lens, seq_lens)
        copies = planner.num_copies
    assert len(addresses) <= 1, "request ids stay where they are"
