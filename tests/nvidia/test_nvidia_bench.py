# SPDX-License-Identifier: Apache-2.0
"""The parts of the side-by-side benchmark that need no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mla_portable_nvidia.tile_schedules import tile_schedule

SCRIPT = Path(__file__).parents[2] / "backends" / "nvidia" / "bench" / "side_by_side.py"


@pytest.fixture(scope="module")
def side_by_side():
    spec = importlib.util.spec_from_file_location("side_by_side", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([], (0, 0)),
        ([(5, 9)], (4, 0)),
        ([(0, 2), (5, 6)], (3, 3)),
        ([(5, 6), (0, 2)], (3, 3)),
        ([(0, 10), (2, 3)], (10, 0)),
        ([(0, 4), (2, 6), (7, 8)], (7, 1)),
    ],
)
def test_idle_time_is_what_no_kernel_covers(side_by_side, intervals, expected):
    assert side_by_side.idle_time(intervals) == expected


def test_every_way_is_compared_with_the_direct_one(side_by_side, monkeypatch):
    idle, rounds = {"direct": 1.0, "ours": 5.0, "engine": 1.5}, []
    monkeypatch.setattr(
        side_by_side, "figures", lambda call, device: {f"{how}_idle_us": idle[call()] for how in ("queued", "graph")}
    )

    def timeline(run):
        rounds.append(run.args[0]())
        late = 100.0 * (len(rounds) <= 3)  # the first round of all is slow
        gap = side_by_side.CALLS * (idle[rounds[-1]] + late)
        return [("kernel", 0.0, 8.0), ("kernel", 8.0 + gap, 8.0 + gap + side_by_side.CALLS)]

    monkeypatch.setattr(side_by_side, "timeline", timeline)
    rows = side_by_side.compare(None, **{name: lambda name=name: name for name in idle})
    assert list(rows) == ["direct", "ours", "engine"] and "eager_idle_added_us" not in rows["direct"]
    assert rounds == [*idle] * side_by_side.ROUNDS and rows["ours"]["eager_busy_us"] == 1.0 + 8.0 / side_by_side.CALLS
    for how in ("eager", "queued", "graph"):
        assert (rows["ours"][f"{how}_idle_added_us"], rows["engine"][f"{how}_idle_added_us"]) == (4.0, 0.5)


@pytest.fixture
def plan():
    """128 rows on 66 parts, two of which have nothing to do: (ours, a provider's words, its num_splits)."""
    ours = tile_schedule([2048] * 128, num_sm_parts=66)
    assert [words[0] >= 128 for words in ours.metadata.tolist()] == [False] * 64 + [True] * 2
    return ours, ours.metadata.tolist(), ours.num_splits.tolist()


def test_a_plan_may_differ_in_what_the_kernel_does_not_read(side_by_side, plan):
    ours, metadata, num_splits = plan
    assert side_by_side.plan_difference(*plan) is None
    for words in metadata:
        words[7] = -77
    metadata[65] = [200, -1, 5, 5, 5, 1, 1, 5]
    assert side_by_side.plan_difference(ours, metadata, num_splits) is None


@pytest.mark.parametrize("word", range(7))
def test_a_word_that_the_kernel_reads_must_be_equal(side_by_side, plan, word):
    ours, metadata, num_splits = plan
    metadata[3][word] += 1
    name = side_by_side.USED_WORDS[word]
    text = f"part 3, word {word} ({name}): {metadata[3][word] - 1} ours, {metadata[3][word]} theirs"
    assert side_by_side.plan_difference(ours, metadata, num_splits) == text


def test_a_plan_may_not_differ_in_who_works_nor_in_its_splits(side_by_side, plan):
    ours, metadata, num_splits = plan
    difference = side_by_side.plan_difference
    assert difference(ours, metadata[:-1], num_splits) == "parts: 66 ours, 65 theirs"
    assert difference(ours, metadata, num_splits[:-1]) == "num_splits: 129 entries ours, 128 theirs"
    assert difference(ours, metadata, [*num_splits[:-1], 7]) == "num_splits[128]: 128 ours, 7 theirs"
    metadata[65][0] = 0
    assert difference(ours, metadata, num_splits) == "part 65, word 0 (begin_req): 128 ours, 0 theirs"
    metadata[65][0], metadata[0][0] = 128, 128
    assert difference(ours, metadata, num_splits) == "part 0, word 0 (begin_req): 0 ours, 128 theirs"


def test_without_a_gpu_it_says_so():
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
    )
    assert done.returncode == 1 and "needs a CUDA GPU" in done.stderr
