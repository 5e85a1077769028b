# SPDX-License-Identifier: Apache-2.0
"""What ci/gpu_vllm concludes from results, and that its processes end: all of it but vLLM itself."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch


def prompt(length: int, tokens: list[int], *, shift: float = 0.0, other: float = -9.0) -> dict[str, Any]:
    """Token 1000 + t is the runner-up of token t, `other` in log-probability."""
    likeliest = [
        {str(token): -1.0 + shift, str(token + 1000 if token < 1000 else token - 1000): other + shift} for token in tokens
    ]
    return {"length": length, "tokens": tokens, "logprobs": likeliest}


def test_what_differs_is_found_and_judged(kit: Any):
    def agree(one: dict[str, Any], two: dict[str, Any], **sides: int) -> Any:
        return kit.judge.agree([one], [two], **sides)

    found = agree(prompt(17, [1, 2]), prompt(17, [1, 2], shift=0.06))
    assert found.compared == 2 and math.isclose(found.difference, 0.06) and not found.parted
    assert found.within(0.1) and not found.within(0.05)
    assert not agree(prompt(17, [1]), prompt(17, [1]), shortest=100).within(0.1), "nothing compared is no agreement"
    unlisted = agree(prompt(17, [1]), prompt(17, [5]))
    assert unlisted.parted[0][2] == math.inf and unlisted.difference == math.inf and not unlisted.within(10.0)
    broken = agree(prompt(17, [1]), prompt(17, [1], shift=math.nan))
    assert broken.difference == math.inf and "inf (prompt of 17, token 0: {" in str(broken) and "nan" in str(broken)
    with pytest.raises(ValueError, match="other prompts"):
        agree(prompt(17, [1]), prompt(18, [1]))


@pytest.mark.parametrize(("other", "tie"), [(-1.05, True), (-1.5, False)])
def test_texts_may_part_only_at_ties(kit: Any, other: float, tie: bool):
    one, two = prompt(17, [1, 2, 3], other=other), prompt(17, [1, 1002, 7], other=other)
    found = kit.judge.agree([one], [two])
    assert found.compared == 2, "what follows the first difference has another past"
    assert [(length, at) for length, at, _ in found.parted] == [(17, 1)]
    assert found.within(0.1) is tie


def test_shadow_mode_must_have_recorded_something_small(kit: Any, tmp_path: Path):
    def passed(*errors: str, method: str = "forward_mqa") -> bool:
        file = tmp_path / "shadow"
        file.write_text("".join(f'{{"layer": "a", "method": "{method}", "relative": {error}}}\n' for error in errors))
        return kit.judge.read_shadow(file)[0]

    assert passed("0.002", "0.004")
    assert not passed() and not passed("0.002", "0.02") and not passed("NaN")
    assert not kit.judge.read_shadow(tmp_path / "absent")[0]
    assert not passed("0.002", method="forward_mha"), "nothing of the method that is asked for"
    assert kit.judge.read_shadow(tmp_path / "shadow", ("forward_mha",))[0]
    assert not kit.judge.read_shadow(tmp_path / "shadow", ("forward_mqa", "forward_mha"))[0]


def test_engines_by_default_cover_prompts_of_every_kind(kit: Any):
    several = [job for job in kit.jobs.agreement() if job.name.startswith("default-plugin-")]
    assert {(job.kv, job.heads) for job in several} == {(kv, heads) for kv in kit.jobs.KV_DTYPES for heads in (16, 128)}
    names = {job.name: job for job in kit.jobs.agreement()}
    for job in several:
        stock = names[job.name.replace("plugin", "stock")]
        assert (stock.arguments, stock.model, stock.mode) == (job.arguments, job.model, job.mode)
        assert stock.options["by_default"] and not stock.options["shadow"]
        assert {17, 6000, 16_000} <= set(job.options["lengths"]) and job.arguments["max_model_len"] > 16_000
        assert job.arguments["enable_prefix_caching"] and job.options["repeats"] == 2
        assert ("speculative_config" in job.arguments) == job.model.startswith("drafts")
    assert {job.arguments["max_num_batched_tokens"] for job in several} == {2048, 8192}, "in chunks, and most in one step"
    assert {job.heads for job in several if job.options["shadow"]} == {job.heads for job in several if "drafts" in job.model}
    assert {job.kv for job in several if job.options["shadow"]} == {job.kv for job in several if "drafts" in job.model}


def test_prompts_by_default_are_compared_and_take_the_way_that_is_meant(kit: Any, tmp_path: Path):
    def judged(name: str, *, shift: float = 0.0, cached: int = 64, per_head: int = 9, shadow: str = "0.001") -> Any:
        def run(by: float, cached: int) -> list[dict[str, Any]]:
            return [{**prompt(17, [1], shift=by / 6), "cached": 0}, {**prompt(16_000, [2], shift=by), "cached": cached}]

        ran = run_of(kit, name, run(shift, 0), run(shift, cached), per_head=per_head)
        ran |= run_of(kit, name.replace("plugin", "stock"), run(0.0, 0), per_head=5)
        line = '{{"layer": "a", "method": "{}", "relative": {}}}\n'
        (tmp_path / f"{name}.shadow").write_text(line.format("forward_mqa", "0.001") + line.format("forward_mha", shadow))
        planned = [done.job for done in ran.values()]
        (found,) = kit.judge.agreement(ran, planned, tmp_path)
        return found

    for name in ("default-plugin-fp8-h16", "default-plugin-bf16-h16"):
        line = judged(name)
        assert line.passed and "9 tokens over keys of each head (stock 5), 64 cached" in line.found
        assert judged(name, shift=0.49).passed and not judged(name, shift=0.51).passed
        assert not judged(name, cached=0).passed and not judged(name, per_head=0).passed
    assert judged("default-plugin-fp8-h16", shadow="0.02").passed, "it is not in shadow mode"
    assert not judged("default-plugin-bf16-h16", shadow="0.02").passed
    ran = run_of(kit, "default-stock-fp8-h16")
    planned = [job for job in kit.jobs.agreement() if job.name == "default-plugin-fp8-h16"]
    assert [line.passed for line in kit.judge.agreement(ran, planned, tmp_path)] == [False]


def test_tokens_over_keys_of_each_head_are_counted(kit: Any):
    class Impl:
        def forward_mha(self, q: list[int], *more: int, output: int) -> tuple[int, ...]:
            return (*q, *more, output)

    layers = [SimpleNamespace(impl=Impl()), SimpleNamespace(impl=object()), SimpleNamespace()]
    found = kit.engine._per_head(layers)
    assert layers[0].impl.forward_mha([1, 2, 3], 4, output=5) == (1, 2, 3, 4, 5)
    assert layers[0].impl.forward_mha([1], output=2) == (1, 2) and found == [3, 1]


def test_jobs_cover_the_matrix_and_have_names_of_their_own(kit: Any):
    several = [*kit.jobs.agreement(), *kit.jobs.tensor_parallel(), *kit.jobs.features(), *kit.jobs.load()]
    several += [*kit.jobs.prompts(), *kit.jobs.rank(), *kit.jobs.rank_long(), *kit.jobs.rank_flash()]
    several += [*kit.jobs.other_models(), *kit.jobs.four_bits(), *kit.jobs.transformers(), *kit.jobs.serve(), *kit.jobs.sinks()]
    assert len({job.name for job in several}) == len(several)
    covered = {(j.who, j.kv, j.heads, j.mode) for j in several if j.task == "generate" and j.gpus == 1}
    for heads in (16, 64, 128):
        for kv in ("auto", "fp8_ds_mla"):
            for mode in ("eager", "graphs"):
                assert {(who, kv, heads, mode) for who in ("stock", "plugin", "triton")} <= covered
    assert {job.task for job in several} == set(kit.engine.TASKS) - {"score"}, "which is of ci/gpu_accuracy"
    assert kit.checkpoint.prompts([3, 5]) == kit.checkpoint.prompts([3, 5])
    assert [len(p["prompt_token_ids"]) for p in kit.checkpoint.prompts([3, 5])] == [3, 5]
    job = next(job for job in several if job.name == "plugin-fp8-h16-eager")
    given = job.llm_arguments(Path("checkpoints"))
    assert given["attention_backend"] == "CUSTOM" and given["enforce_eager"] and given["model"] == "checkpoints/heads16"


def test_stock_runs_without_the_plugin_and_eager_plugins_run_shadowed(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLA_PORTABLE_BACKEND", "reference")
    for job in kit.jobs.agreement():
        environ = job.process_environ(tmp_path)
        assert environ.get("MLA_PORTABLE_BACKEND") == ("triton" if job.who == "triton" else None), "the caller's wish leaked"
        assert (environ["MLA_PORTABLE_VLLM"] == "off") == (job.who == "stock")
        if job.task == "generate" and job.mode == "eager":
            assert job.options["shadow"] == (job.who in ("plugin", "triton", "override"))


LOG = """INFO 11-22 10:00:00 [core.py:1] starting
Traceback (most recent call last):
  File "b.py", line 2, in work
    raise ValueError("first")
ValueError: first
(Worker_TP0 pid=7) ERROR 11-22 10:00:01 [exec.py:2]   File "c.py", line 3, in stop
(Worker_TP0 pid=7) ERROR 11-22 10:00:01 [exec.py:2] RuntimeError: last
"""


def test_a_failure_names_the_first_error_and_the_last(kit: Any):
    assert kit.kit.errors_of(LOG) == ["ValueError: first", "RuntimeError: last"]
    assert kit.kit.errors_of("killed") == ["killed"]


VLLM = """
import os, subprocess, time
from types import SimpleNamespace as Some

SamplingParams = Some


class LLM:
    def __init__(self, **given):
        print("mla_portable serves 2 layers on x by route fused: sparse_decode triton.portable; cache", flush=True)
        if given["block_size"] != 64:
            raise RuntimeError("no luck") from ValueError("block_size 16")
        if os.environ.get("WORKER"):
            with open(os.environ["WORKER"], "w") as file:
                file.write(str(subprocess.Popen(["sleep", "60"]).pid))
        time.sleep(int(os.environ.get("SLEEP", 0)))
        layers = {"a": Some(impl=given["attention_config"])}
        cache, parallel = Some(num_gpu_blocks=10, block_size=64), Some(decode_context_parallel_size=2)
        compiled = Some(static_forward_context=layers)
        config = Some(compilation_config=compiled, cache_config=cache, parallel_config=parallel)
        self.connector = Some(update_state_after_alloc=lambda request, blocks, number: None)
        core = Some(engine_core=Some(scheduler=Some(connector=self.connector)))
        self.llm_engine = Some(vllm_config=config, engine_core=core)

    def generate(self, requests, sampling, use_tqdm):
        texts = [Some(token_ids=[7] * one.max_tokens, logprobs=[{7: Some(logprob=-0.5)}] * one.max_tokens) for one in sampling]
        self.connector.update_state_after_alloc(None, None, 64)
        done = zip(texts, requests, strict=True)
        return [Some(outputs=[text], num_cached_tokens=0, **request) for text, request in done]
"""


@pytest.fixture
def job(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes a job whose process runs the kit's engine on a stand-in for vLLM."""
    package = tmp_path / "modules" / "vllm"
    (package / "config").mkdir(parents=True)
    (package / "__init__.py").write_text(VLLM)
    (package / "config" / "__init__.py").touch()
    (package / "config" / "attention.py").write_text("class AttentionConfig:\n    sparse_mla_force_mqa = False\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")]))

    def make(name: str, task: str = "generate", *, block: int = 64, says: str = "", **more: Any) -> Any:
        options = {"lengths": (3, 5), "tokens": 2, "repeats": 2, "says": says}
        return kit.jobs.Job(name, task, "plugin", arguments={"block_size": block}, options=options, **more)

    return make


def ended(pid: int) -> bool:
    """The process is gone, or only waits to be collected."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_processes_leave_results_or_errors_and_end_with_their_workers(kit: Any, job: Callable[..., Any], tmp_path: Path):
    worker, begin = tmp_path / "worker", time.monotonic()
    todo = [
        job("good", environ={"WORKER": str(worker)}),
        job("bad", block=16),
        job("without", rehearsal={"hidden": ["flashmla"]}),
        job("misnamed", rehearsal={"hidden": ["flashmall"]}),
        job("slow", environ={"SLEEP": "90"}, seconds=2),
        job("refuse-block", "refuse", block=16, says="block_size"),
        job("refuse-none", "refuse", says="block_size"),
    ]
    found = kit.kit.run(todo, tmp_path, tmp_path, parallel=7, end=begin + 80)
    assert time.monotonic() - begin < 80
    good = {"tokens": [7, 7], "logprobs": [{"7": -0.5}, {"7": -0.5}], "cached": 0}
    assert found["good"].runs == [[{"length": 3, **good}, {"length": 5, **good}]] * 2
    assert not found["good"].error and found["good"].result["impl"] == ["dict"], "dense attention for short prompts is off"
    assert found["good"].result["pool"] == 10 * 64 * 2 and found["good"].result["outside"] == 2 * 64
    assert found["good"].served == "fused: sparse_decode triton.portable"
    assert ended(int(worker.read_text()))
    assert found["bad"].runs == [] and found["bad"].error == "exit 1\nValueError: block_size 16\nRuntimeError: no luck"
    assert found["without"].runs == found["good"].runs and "flashmall" in found["misnamed"].error
    assert found["slow"].error.startswith("ran out of time")
    lines = {line.name: line.passed for line in kit.judge.agreement(found, [], tmp_path)}
    assert lines == {"refuse-block": True, "refuse-none": False}


def test_nothing_starts_when_time_is_over(kit: Any, job: Callable[..., Any], tmp_path: Path):
    assert kit.kit.run([job("late")], tmp_path, tmp_path, parallel=1, end=time.monotonic()) == {}


def test_nobody_measures_while_an_engine_starts(kit: Any, tmp_path: Path):
    order: list[str] = []

    def measure() -> None:
        with kit.timing.turn(tmp_path):
            order.append("turn")

    with kit.timing.starting(tmp_path), kit.timing.starting(tmp_path):
        thread = threading.Thread(target=measure)
        thread.start()
        thread.join(0.3)
        order.append("started")
    thread.join(10)
    assert order == ["started", "turn"]


def run_of(
    kit: Any, name: str, *runs: list[dict[str, Any]], served: str = "fused: sparse_decode triton.portable", **result: Any
):
    names = ("agreement", "tensor_parallel", "features", "load", "prompts", "rank", "rank_long", "rank_flash", "other_models")
    names += ("four_bits", "serve", "sinks")
    lists = [getattr(kit.jobs, each) for each in names]
    several = [*(job for jobs in lists for job in jobs()), *kit.jobs.context_parallel(2)]
    job = next(job for job in several if job.name == name)
    return {name: kit.judge.Done(job, {"runs": list(runs), **result}, "", served)}


def cell(kit: Any, ours: float, out: Path, served: str = "fused: sparse_decode nvidia.flashmla", relative: str = "0.001"):
    """The lines of one cell where ours differs from stock by `ours` on a long prompt."""

    def texts(short: float, long: float) -> list[dict[str, Any]]:
        return [prompt(17, [1, 2], shift=short), prompt(3000, [3], shift=long)]

    ran = run_of(kit, "stock-fp8-h64-eager", texts(0, 0), texts(0, 0.1), served="")
    ran |= run_of(kit, "stock-fp8-h64-graphs", texts(0, -0.1), served="")
    ran |= run_of(kit, "plugin-fp8-h64-eager", texts(ours / 6, ours), served=served)
    (out / "plugin-fp8-h64-eager.shadow").write_text(f'{{"layer": "a", "method": "forward_mqa", "relative": {relative}}}')
    planned = [job for job in kit.jobs.agreement() if "fp8-h64" in job.name and job.who in ("stock", "plugin", "triton")]
    lines = {line.name: line for line in kit.judge.agreement(ran, planned, out)}
    assert lines.keys() == {job.name for job in planned} - {"stock-fp8-h64-graphs"}
    return lines["plugin-fp8-h64-eager"], lines["triton-fp8-h64-graphs"]


def test_long_prompts_may_differ_as_correct_runs_do(kit: Any, tmp_path: Path):
    line, missing = cell(kit, 0.49, tmp_path)
    assert line.passed and "long 0.490 over" in line.found
    assert missing.passed is False and "did not finish" in missing.found
    assert not cell(kit, 0.51, tmp_path)[0].passed
    assert not cell(kit, 0.29, tmp_path, served="")[0].passed, "somebody else attended"
    assert not cell(kit, 0.29, tmp_path, relative="0.5")[0].passed


def test_requests_must_be_preempted_and_none_cut_short(kit: Any):
    def passed(preempted: int, tokens: int = 2, shift: float = 0.0) -> bool:
        ran = run_of(kit, "requests-plugin-one", [prompt(100, [1, 2])])
        ran |= run_of(kit, "requests-plugin-small", [prompt(100, [1, 2], shift=shift)], wanted=[tokens], preempted=preempted)
        return kit.judge._many(ran, "requests-plugin", *ran).passed

    assert passed(3) and not passed(0) and not passed(3, tokens=5) and not passed(3, shift=0.2)


def test_two_gpus_are_held_against_one(kit: Any):
    def passed(name: str, shift: float, served: str = "fused: sparse_decode triton.portable") -> bool:
        def texts(by: float) -> list[dict[str, Any]]:
            return [prompt(17, [1], shift=by), prompt(3000, [2], shift=by)]

        ran = run_of(kit, "tp1-plugin", texts(0)) | run_of(kit, name, texts(shift), served=served)
        (line,) = kit.judge.tensor_parallel(ran)
        return line.passed

    for name in ("tp2-plugin", "pp2-plugin", "dp2-plugin", "dbo2-plugin"):
        assert passed(name, 0.05) and not passed(name, 0.2), name
    assert not passed("tp2-plugin", 0.05, served="")


def test_shared_sequences_are_held_against_one_gpu(kit: Any):
    def texts(by: float) -> list[dict[str, Any]]:
        return [prompt(17, [1], shift=by / 6), prompt(3000, [2], shift=by)]

    planned = kit.jobs.context_parallel(2)
    assert {(job.kv, job.heads, job.mode) for job in planned if job.gpus == 2} >= {("fp8_ds_mla", 64, "graphs")}
    assert all("decode_context_parallel_size" in job.arguments for job in planned if job.gpus > 1)
    assert {job.gpus for job in kit.jobs.context_parallel(4)} == {1, 4}

    def judged(shift: float, *, lost: int = 0, **more: Any) -> dict[str, Any]:
        ran = run_of(kit, "dcp1-plugin-fp8-h64", texts(0), pool=1000)
        ran |= run_of(kit, "tp2dcp2-fp8-h64-graphs", texts(shift), pool=2000, **more)
        result = {"wanted": [1 + lost, 1], "preempted": 3}
        for way in ("one", "small"):
            ran |= run_of(kit, f"requests-tp2dcp2-{way}", texts(0), **result)
        return {line.name: line for line in kit.judge.context_parallel(ran, planned)}

    lines = judged(0.49)
    assert lines["tp2dcp2-fp8-h64-graphs"].passed and lines["requests-tp2dcp2-small"].passed
    assert "2000 tokens in the cache (1000)" in lines["tp2dcp2-fp8-h64-graphs"].found
    assert lines["tp2dcp2-bf16-h128-graphs"].passed is False
    assert not judged(0.51)["tp2dcp2-fp8-h64-graphs"].passed
    assert not judged(0.49, served="")["tp2dcp2-fp8-h64-graphs"].passed
    assert not judged(0.49, lost=1)["requests-tp2dcp2-small"].passed


def test_features_are_held_against_the_engine_without_them(kit: Any):
    def texts(by: float) -> list[dict[str, Any]]:
        return [prompt(17, [1], shift=by), prompt(3000, [2], shift=by)]

    def passed(*shifts: float, small: float = 0.0, preempted: int = 3) -> dict[str, Any]:
        ran = run_of(kit, "feature-none", texts(0), texts(0.01)) | run_of(kit, "feature-sleep", *map(texts, shifts))
        ran |= run_of(kit, "feature-all-one", texts(0))
        ran |= run_of(kit, "feature-all-small", texts(small), wanted=[1, 1], preempted=preempted)
        return {line.name: line.passed for line in kit.judge.features(ran)}

    assert passed(0.0, 0.09) == {"feature-none": None, "feature-sleep": True, "feature-all": True}
    assert not passed(0.0, 0.2)["feature-sleep"], "after it woke up"
    assert not passed(0.0, small=0.2)["feature-all"] and not passed(0.0, preempted=0)["feature-all"]
    for name, cached, outside, right in (
        ("feature-prefixes", 64, 0, True),
        ("feature-prefixes", 0, 64, False),
        ("feature-connector", 0, 64, True),
        ("feature-connector", 64, 0, False),
    ):
        run = [{**each, "cached": cached} for each in texts(0)]
        ran = run_of(kit, "feature-none", texts(0)) | run_of(kit, name, texts(0), run, outside=outside)
        assert [line.passed for line in kit.judge.features(ran)] == [None, right], "it has to be used"


def test_the_plugin_is_timed_beside_stock_as_it_is_by_default(kit: Any):
    assert all(job.options["by_default"] for job in kit.jobs.load())

    def passed(cell: str, step: float) -> list[bool | None]:
        times = {"first": {"8 x 1024": 8.4}, "tokens_s": 100.0}
        ran = run_of(kit, f"load-plugin-{cell}", step_us=step, **times)
        ran |= run_of(kit, f"load-stock-{cell}", step_us=1000.0, **times)
        return [line.passed for line in kit.judge.load(ran)]

    assert passed("fp8-h128-graphs", 1020.0) == [None, None, True] and passed("fp8-h128-graphs", 1040.0)[-1] is False
    assert passed("fp8-h128-eager", 1040.0) == passed("fp8-h16-graphs", 1040.0) == [None] * 3
    ran = run_of(kit, "load-plugin-fp8-h16-eager", first={}) | run_of(kit, "load-stock-fp8-h16-eager")
    ran["load-stock-fp8-h16-eager"].result.clear()
    assert [line.passed for line in kit.judge.load(ran)] == [False]


def test_a_layers_time_of_prompts_is_not_above_stocks(kit: Any):
    assert all(job.options["by_default"] for job in (*kit.jobs.prompts(), *kit.jobs.rank()))

    def passed(ours: float) -> list[bool | None]:
        both = {"stock": {"attend": 600.0, "project": 400.0}, "plugin": {"attend": ours}}
        names = {who: f"prompts-{who}-fp8-h16" for who in both}
        ran = {}
        for who, kernels in both.items():
            ran |= run_of(kit, names[who], first={"8 x 1000": kernels})
        return [line.passed for line in kit.judge.prompts(ran)]

    assert passed(1019.0) == [True] and passed(1021.0) == [False]
    ran = run_of(kit, "prompts-plugin-fp8-h16", first={}) | run_of(kit, "prompts-stock-fp8-h16")
    ran["prompts-stock-fp8-h16"].result.clear()
    assert [line.passed for line in kit.judge.prompts(ran)] == [False]


def rank_result(first: float = 300.0, *, unknown: float = 1.0) -> dict[str, Any]:
    kernels = {"kinds": {"MoE": 99.0, "unknown": unknown}, "unknown": {"new_kernel": unknown}}
    return {"first": {"8 x 1000": first}, "step_us": {"16": 17_000.0}, "kernels": {"1 x 8000": kernels}, "layers": 31}


def rank_lines(kit: Any, *results: tuple[str, dict[str, Any]]) -> list[tuple[str, bool | None]]:
    ran: dict[str, Any] = {}
    for name, result in results:
        ran |= run_of(kit, name, **result)
        ran[name].result.pop("runs")
    return [(line.found, line.passed) for line in kit.judge.rank(ran)]


def test_first_tokens_are_judged_and_steps_inform(kit: Any):
    lines = rank_lines(kit, ("rank16-plugin", rank_result(305.0)), ("rank16-stock", rank_result()))
    ours, stocks = lines[:5], lines[5:]
    assert ours == [
        ("first token of 8 x 1000: 305.0 ms, stock 300.00, 1.017 of it", True),
        ("a decode of 16: 17.00 ms, stock 17.00, 1.000 of it", None),
        ("1 x 8000, us a layer: 100, stock 100.00, 1.000 of it", None),
        ("1 x 8000, us a layer: 99, stock 99 MoE", None),
        ("1 x 8000, us a layer: 1.0 unknown; new_kernel 1.0", True),
    ]
    assert stocks[0] == ("first token of 8 x 1000: 300.0 ms", None) and len(stocks) == 5
    late = rank_lines(kit, ("rank128-plugin", rank_result(307.0)), ("rank128-stock", rank_result()))
    assert late[0][1] is False
    alone = rank_lines(kit, ("rank16-plugin", rank_result(1e9)))
    assert [passed for _, passed in alone] == [None, None, None, None, True], "nothing to hold it against"
    assert rank_lines(kit, ("rank16-plugin", rank_result()), ("rank16-stock", {}))[0] == ("did not finish", False)
    assert rank_lines(kit, ("rank16-stock", {})) == [("did not finish", False)]


def test_kernels_of_no_known_kind_must_take_little(kit: Any):
    for unknown, passed in ((1.9, True), (2.1, False)):
        assert rank_lines(kit, ("rank16-stock", rank_result(unknown=unknown)))[-1][1] is passed


def test_a_rank_has_the_weights_of_one_of_eight_gpus(kit: Any, tmp_path: Path):
    for heads in kit.jobs.RANK_HEADS:
        kit.named_models.write_model(tmp_path, f"rank{heads}")
        config = json.loads((tmp_path / f"rank{heads}" / "config.json").read_text())
        hidden, queries = config["hidden_size"], config["q_lora_rank"]
        experts = (config["n_routed_experts"] + 1) * 3 * hidden * config["moe_intermediate_size"]
        attention = hidden * (queries + 576 + heads * 128) + queries * heads * 192 + 512 * heads * 256
        layers = config["num_hidden_layers"]
        weights = 2 * (layers * attention + (layers - config["first_k_dense_replace"]) * experts)
        assert layers == 61 and 78e9 < weights < 95e9, "beside 12 GiB of cache on 141 GB"


def test_a_rank_with_long_contexts_is_the_same_model_for_longer_sequences(kit: Any, tmp_path: Path):
    plugin, stock = kit.jobs.rank_long()
    assert (plugin.who, stock.who, plugin.options, plugin.arguments) == ("plugin", "stock", stock.options, stock.arguments)
    configs: list[dict[str, Any]] = []
    for name in (plugin.model, "rank16"):
        kit.named_models.write_model(tmp_path, name)
        configs.append(json.loads((tmp_path / name / "config.json").read_text()))
    longer, shorter = configs
    assert {key for key in longer if longer[key] != shorter[key]} == {"max_position_embeddings", "rope_scaling"}
    assert longer["rope_scaling"]["factor"] == 16 and shorter["rope_scaling"]["factor"] == 4
    longest = max(length for _, length in plugin.options["first"])
    assert longest == 64_000 < plugin.arguments["max_model_len"] == longer["max_position_embeddings"]
    cached = max(each["batch"] * (each["prompt"] + each["tokens"]) for each in plugin.options["decodes"])
    assert cached * 61 * (656 + 132) < plugin.arguments["kv_cache_memory_bytes"], "of keys, and of the indexer's"


def test_a_rank_of_glm_flash_has_the_weights_of_one_of_four_gpus(kit: Any, tmp_path: Path):
    """The real model's fields, and as many bytes of experts as 72 in FP8."""
    (heads,) = {job.heads for job in kit.jobs.rank_flash()}
    kit.named_models.write_model(tmp_path, f"rankflash{heads}")
    config = json.loads((tmp_path / f"rankflash{heads}" / "config.json").read_text())
    hidden, layers, queries = config["hidden_size"], config["num_hidden_layers"], config["q_lora_rank"]
    assert (hidden, layers, queries, heads * 4) == (4096, 45, 1536, 64)
    assert (config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"], config["index_kpool"]) == (
        256,
        0,
        256,
        4,
    )
    sparse = [number for number, kind in enumerate(config["layer_types"]) if kind != "linear_attention"]
    assert sparse == list(range(3, layers, 4)) and len(sparse) == 11
    experts = (config["n_routed_experts"] + 1) * 3 * hidden * config["moe_intermediate_size"]
    assert config["n_routed_experts"] == 288 // 4 // 2
    width = config["linear_num_heads"] * config["linear_head_dim"]
    linear = hidden * (4 * width + 2 * 128 + config["linear_num_heads"]) + 2 * 128 * width
    attention = hidden * (queries + 512 + heads * 256) + queries * heads * 256 + 512 * heads * 512
    weights = 2 * (experts * (layers - 1) + linear * (layers - 11) + attention * 11)
    assert 80e9 < weights < 90e9, "beside 12 GiB of cache on 141 GB"


def test_a_rank_that_stock_does_not_serve_is_timed_alone(kit: Any):
    ran = run_of(kit, "rankflash16-plugin", **rank_result(305.0))
    stock = next(job for job in kit.jobs.rank_flash() if job.name == "rankflash16-stock")
    assert (stock.who, stock.kv) == ("choice", "auto")
    for error, passed in (("ValueError: No valid attention backend found for NVIDIA H200", None), ("exit 1", False)):
        both = ran | {stock.name: kit.judge.Done(stock, {}, error)}
        lines = list(kit.judge.rank(both))
        assert {line.passed for line in lines if line.name == stock.name} == {passed}
        times = [line for line in lines if line.name == "rankflash16-plugin"]
        assert (len(times) > 1) is (passed is None) and ("stock" in times[0].found) is False


def test_ranks_are_as_by_default_and_a_head_count_is_chosen_by_name(kit: Any):
    names = [job.name for job in kit.jobs.rank()]
    assert names == ["rank16-plugin", "rank16-stock", "rank128-plugin", "rank128-stock"]
    assert {(job.mode, job.model) for job in kit.jobs.rank()} == {("default", "half16"), ("default", "half128")}
    assert {job.mode for job in (*kit.jobs.rank_long(), *kit.jobs.rank_flash())} == {"graphs"}
    for job in kit.jobs.rank():
        longest = max(length for _, length in job.options["first"])
        assert longest == 16_000 > job.arguments["max_num_batched_tokens"] and longest < job.arguments["max_model_len"]
        assert set(job.options["profiled"]) <= set(job.options["first"]), "kernels are compiled before they are profiled"
        turns, steps = kit.timing._RANK_TURNS, kit.timing._STEPS + 4
        for each in job.options["decodes"]:
            prefills = -(-each["batch"] * each["prompt"] // job.arguments["max_num_batched_tokens"])
            assert each["tokens"] > turns * steps + prefills, "none may end before its steps are timed"


def test_the_plugins_engines_run_with_our_layer_where_that_is_asked_for(kit: Any, tmp_path: Path):
    asked = {job.who: kit.jobs.with_layer(job).process_environ(tmp_path) for job in (*kit.jobs.rank(), *kit.jobs.indexer())}
    assert {who: environ.get("MLA_PORTABLE_VLLM_LAYER") for who, environ in asked.items()}.items() >= {
        ("plugin", "on"),
        ("stock", None),
        ("sm80", "on"),
    }


class RankEngine:
    """Stands for vLLM's engine: a step takes 2 ms, and gives each request a token."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.most, self.prompts = 0, list[int]()
        text = SimpleNamespace(num_hidden_layers=61)
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(hf_config=text))

    def add_request(self, name: str, prompt: dict[str, list[int]], wanted: Any) -> None:
        self.left[name] = wanted.max_tokens
        self.prompts.append(len(prompt["prompt_token_ids"]))
        self.most = max(self.most, len(self.left))

    def step(self) -> list[Any]:
        time.sleep(0.002)
        torch.ones(4, 512) @ torch.ones(512, 4)
        outputs = [SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[1])]) for name in self.left]
        self.left = {name: left - 1 for name, left in self.left.items() if left > 1}
        return outputs

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def get_num_unfinished_requests(self) -> int:
        return len(self.left)

    def abort_request(self, names: list[str]) -> None:
        self.left = {name: left for name, left in self.left.items() if name not in names}


def test_a_rank_is_timed_and_profiled(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any):
    engine = RankEngine()

    def generate(several: list[dict[str, list[int]]], wanted: list[Any], use_tqdm: bool) -> None:
        for number, (prompt, one) in enumerate(zip(several, wanted, strict=True)):
            engine.add_request(str(number), prompt, one)
        while engine.has_unfinished_requests():
            engine.step()

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    launched = SimpleNamespace(kernel="fused_moe_kernel", operator="", shapes=(), us=122.0)
    read: list[int] = []
    monkeypatch.setattr(kit.timing, "launches", lambda events: read.append(len(events)) or [launched])
    monkeypatch.setattr(kit.timing, "_STEPS", 5)
    decodes = [{"batch": batch, "prompt": 30, "tokens": 40} for batch in (1, 3)]
    options = {"first": ((2, 10),), "profiled": ((2, 10),), "decodes": decodes}
    found = kit.timing.rank(SimpleNamespace(llm_engine=engine, generate=generate), options, tmp_path)
    assert found["kernels"] == {"2 x 10": {"kinds": {"MoE": 2.0}, "unknown": {}}}
    assert read[0] > 2, "the host's operators are in the profile"
    assert set(found["first"]) == {"2 x 10"} and 2 <= found["first"]["2 x 10"] < 200
    assert set(found["step_us"]) == {"1", "3"} and all(2000 <= us < 100_000 for us in found["step_us"].values())
    assert engine.most == 3 and not engine.left and set(engine.prompts) == {10, 30}
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    assert json.loads(lines[0])["first"] == found["first"] and json.loads(lines[1]) == found["kernels"], "known before the end"
    with pytest.raises(RuntimeError, match="ended while their steps were timed"):
        kit.timing.rank(
            SimpleNamespace(llm_engine=engine, generate=generate),
            {**options, "decodes": [{**decodes[0], "tokens": 9}]},
            tmp_path,
        )


def test_times_of_ranks_and_every_line_go_into_the_file_of_a_run(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from mla_portable.capability.run import read_run

    ran = run_of(kit, "rank16-plugin", **rank_result(305.0)) | run_of(kit, "rank16-stock", **rank_result())
    times = kit.kit.rank_times(ran, "vllm 1.0")
    found = [(time.backend, time.quantity, time.requests, time.tokens, time.kernels, time.us) for time in times]
    assert found[:4] == [
        ("plugin", "first_token", 8, 1000, "", 305_000.0),
        ("plugin", "decode", 16, 3000, "", 17_000.0),
        ("plugin", "layer", 1, 8000, "MoE", 99.0),
        ("plugin", "layer", 1, 8000, "unknown", 1.0),
    ]
    assert [time[0] for time in found] == ["plugin"] * 4 + ["stock"] * 4 and {time.heads for time in times} == {16}
    assert {(time.mode, time.layers) for time in times} == {("default", 31)}
    assert kit.kit.rank_times(run_of(kit, "tp1-plugin"), "vllm 1.0") == []
    lines, path = list(kit.judge.rank(ran)), tmp_path / "run.json.gz"
    monkeypatch.setattr(kit.kit.metadata, "version", lambda name: "1.0")
    kit.kit.record(path, "rank", lines, times, who="a_test", commit=None)
    run = read_run(path)
    assert run.engine_times == times and run.versions["vllm"] == "1.0" and run.who == "a_test"
    assert [each.text for each in run.comparisons] == [line.found for line in lines], "also lines of one name"


def test_a_mixed_load_is_the_same_for_every_rate_and_continues_conversations(kit: Any):
    options = kit.jobs._SERVED
    at_once, arriving = (kit.mixed_load.trace(options, rate, 16_384) for rate in (None, 4.0))
    assert [(each.prompt, each.tokens) for each in at_once] == [(each.prompt, each.tokens) for each in arriving]
    assert {each.at for each in at_once} == {0.0}
    gaps = [after.at - before.at for before, after in pairwise(arriving)]
    assert min(gaps) > 0 and 0.15 < sum(gaps) / len(gaps) < 0.4, "4 a second, drawn"
    lengths = sorted(len(each.prompt) for each in at_once)
    assert lengths[0] >= 48 and lengths[-1] <= 12_000 and 800 < lengths[len(lengths) // 2] < 2500
    prompts = [each.prompt for each in at_once]
    continued = [p for n, p in enumerate(prompts) if any(p[: len(q)] == q for q in prompts[:n])]
    assert 0.1 < len(continued) / len(prompts) < 0.5
    limits = {job.arguments["max_model_len"] for job in kit.jobs.serve()}
    assert max(len(each.prompt) + each.tokens for each in at_once) < min(limits)


class Drafting:
    """Stands for vLLM's engine with drafts: each step takes a second and gives each request two tokens, the first one alone."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.made, self.wanted = clock, dict[str, int](), dict[str, int]()

    def add_request(self, name: str, prompt: dict[str, list[int]], wanted: Any) -> None:
        self.made[name], self.wanted[name] = 0, wanted.max_tokens

    def has_unfinished_requests(self) -> bool:
        return bool(self.made)

    def step(self) -> list[Any]:
        self.clock[0] += 1.0
        found = []
        for name in list(self.made):
            self.made[name] = min(self.made[name] + (2 if self.made[name] else 1), self.wanted[name])
            found.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[7] * self.made[name])]))
            if self.made[name] == self.wanted[name]:
                del self.made[name]
        return found


def test_a_load_is_served_and_its_waits_are_counted(kit: Any, monkeypatch: pytest.MonkeyPatch):
    clock = [100.0]
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    monkeypatch.setattr(kit.mixed_load.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    requests = [kit.mixed_load.Request(at, [2, 3], tokens) for at, tokens in ((0.0, 3), (0.5, 2), (10.0, 5))]
    found = kit.mixed_load.serve(Drafting(clock), requests, clock=lambda: clock[0])
    assert [each.tokens for each in found] == [[1.0, 1.5, 2.0], [2.0, 3.0], [11.0, 11.5, 12.0, 12.5, 13.0]]
    load = kit.mixed_load.measured(found)
    assert load["seconds"] == 13.0 and load["tokens_s"] == round(10 / 13, 1)
    assert load["first_ms"]["mean"] == round((1000 + 1500 + 1000) / 3, 3) and load["between_ms"]["p50"] == 500.0


def served(kit: Any, *waits: float, ours: tuple[str, ...] = ()) -> dict[str, Any]:
    """What the job of an engine returns: a first load, and one for each of `waits`. ours: kernels that the first compiled."""
    compiled = {"slow_kernel": 2, **dict.fromkeys(ours, 1)}
    first = {"turn": -1, "rate": None, "tokens_s": 1.0, "first_ms": {}, "between_ms": {}, "compiled": compiled}
    loads = [{**first, "ours": list(ours)}]
    for turn, wait in enumerate(waits):
        several = {"mean": wait, "p50": wait, "p99": 2 * wait}
        load = {"turn": turn, "rate": None, "tokens_s": 1e5 / wait, "first_ms": several, "between_ms": several}
        loads.append({**load, "compiled": {}, "ours": []})
    return {"loads": loads, "peak_mib": 100, "layers": 31}


def test_loads_are_held_against_stock_s_and_go_into_the_file_of_a_run(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from mla_portable.capability.run import read_run

    ran = run_of(kit, "serve16-plugin-default", **served(kit, 50.0, 70.0, 60.0))
    ran |= run_of(kit, "serve16-stock-default", **served(kit, 100.0, 120.0, 110.0))
    lines = [line.found for line in kit.judge.serve(ran)]
    assert len(lines) == 4 and "all at once, 31 layers: tokens_s 1666.7 / 909.1 = 1.833" in lines[0]
    assert "first_ms p99 120.0 / 220.0 = 0.545" in lines[0]
    assert lines[1] == "plugin: peak 100 MiB; compiled while serving: slow_kernel 2"
    loads = kit.kit.served_loads(ran, "vllm 1.0")
    assert [(each.backend, each.turn, each.mode) for each in loads] == [
        (who, turn, "default") for who in ("plugin", "stock") for turn in range(3)
    ]
    monkeypatch.setattr(kit.kit.metadata, "version", lambda name: "1.0")
    path = tmp_path / "run.json.gz"
    kit.kit.record(path, "serve", [], [], loads, who="a_test", commit=None)
    kit.kit.record(path, "serve", [], [], loads[:1], who="a_test", commit=None)
    assert read_run(path).engine_loads == loads, "the newer one of a size stays"
    alone = run_of(kit, "serve16-plugin-default", **served(kit, 1.0))
    assert list(kit.judge.serve(alone)) == [], "nothing to hold it against"


def test_a_kernel_of_ours_that_a_request_waited_for_fails_the_load(kit: Any):
    stock = run_of(kit, "serve16-stock-default", **served(kit, 100.0, ours=("reads_disk_kernel",)))
    for ours, passed in (((), True), (("gather_kernel",), False)):
        ran = run_of(kit, "serve16-plugin-default", **served(kit, 50.0, ours=ours)) | stock
        judged = {line.found: line.passed for line in kit.judge.serve(ran) if line.passed is not None}
        assert judged == {f"of mla_portable, compiled while serving: {', '.join(ours) or 'nothing'}": passed}


def test_kernels_that_are_compiled_are_ours_by_the_module_that_defines_them(kit: Any):
    knobs = pytest.importorskip("triton").knobs
    before = knobs.runtime.jit_post_compile_hook
    with kit.mixed_load.compilations() as found:
        for module, name in (
            ("mla_portable_triton.kernels.gather_upconvert", "gather_upconvert_kernel"),
            ("vllm.model_executor.layers.fused_moe", "fused_moe_kernel"),
            ("mla_portable_nvidia.fa3.prompt_lse", "_prompt_lse_kernel"),
        ):
            knobs.runtime.jit_post_compile_hook(fn=SimpleNamespace(module=module, name=name), key="")
    assert knobs.runtime.jit_post_compile_hook is before
    assert set(found.kernels) == {"gather_upconvert_kernel", "fused_moe_kernel", "_prompt_lse_kernel"}
    assert found.ours == {"gather_upconvert_kernel", "_prompt_lse_kernel"}


def test_weights_are_drawn_by_name(kit: Any):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 64)).to(torch.bfloat16)
    kit.drawn_weights.draw(model)
    first, norm, last = model
    assert 0.015 < first.weight.std() < 0.025 and not first.weight.equal(last.weight)
    assert norm.weight.eq(1).all() and first.bias.eq(0).all() and norm.bias.eq(0).all()
    before = first.weight.clone()
    kit.drawn_weights.draw(model)
    assert first.weight.equal(before)


def test_the_kit_refuses_earlier_results_and_to_run_nothing(kit: Any, tmp_path: Path):
    with pytest.raises(SystemExit, match="no job"):
        kit.kit.main([str(tmp_path / "new"), "--only", "nonsense"])
    with pytest.raises(SystemExit, match="not empty"):
        kit.kit.main([str(tmp_path)])


def test_checkpoints_share_what_they_have_in_common(kit: Any):
    small, large = kit.checkpoint.tensors(16), kit.checkpoint.tensors(64)
    name = "model.layers.0.self_attn.indexer.wq_b.weight"
    assert small.keys() == large.keys() and small[name].equal(large[name])
    assert large["model.layers.1.self_attn.q_b_proj.weight"].shape == (64 * 192, 256)


def nibbles(words: torch.Tensor) -> torch.Tensor:
    """[A, B] int32 -> [A, 8 B], the lowest four bits first."""
    return torch.stack([(words >> 4 * place) & 15 for place in range(8)], dim=-1).flatten(1)


@pytest.mark.parametrize("kind", ["packed", "awq"])
def test_weights_of_four_bits_are_those_of_the_model_rounded(
    kit: Any, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
):
    """Read back by the formats' definitions. The indexer, norms and embeddings stay."""
    written: list[Any] = []
    monkeypatch.setattr(kit.named_models, "write", lambda *given: written.extend(given))
    kit.named_models.write_model(tmp_path, f"{kind}16")
    folder, config, make = written
    stored = make()
    assert folder == tmp_path / f"{kind}16" and json.dumps(config)
    assert config["quantization_config"]["quant_method"] == {"packed": "compressed-tensors", "awq": "awq"}[kind]
    plain = kit.checkpoint.tensors(16)
    rounded = 0
    for name, weight in plain.items():
        own = name.removesuffix(".weight")
        if name in stored:
            assert stored.pop(name).equal(weight) and ("indexer" in name or weight.dim() == 1 or own in ("lm_head", EMBEDDING))
            continue
        rounded += 1
        if kind == "packed":
            assert tuple(stored.pop(f"{name}_shape")) == weight.shape
            scale = stored.pop(f"{name}_scale").float().repeat_interleave(128, dim=1)
            values = (nibbles(stored.pop(f"{name}_packed")) - 8) * scale
        else:
            order = [0, 4, 1, 5, 2, 6, 3, 7]  # of the nibble that has each of eight outputs
            scale = stored.pop(f"{own}.scales").float().repeat_interleave(128, dim=0)
            codes, zeros = (
                nibbles(stored.pop(f"{own}.{part}")).unflatten(1, (-1, 8))[..., order].flatten(1)
                for part in ("qweight", "qzeros")
            )
            values, scale = ((codes - zeros.repeat_interleave(128, dim=0)) * scale).T, scale.T
        assert ((values - weight.float()).abs() <= 1.01 * scale).all() and (values - weight.float()).norm() > 0
        assert (values - weight.float()).norm() < 0.2 * weight.float().norm(), name
    assert not stored and rounded == 2 * 8  # of each layer: five of attention, three of the feed-forward network


def test_weights_of_four_bits_are_compared_with_stock_on_the_same_checkpoint(kit: Any):
    planned = kit.jobs.four_bits()
    names = {job.name for job in planned}
    assert {
        f"{kind}-{who}-{kv}-eager" for kind in ("packed", "awq") for who in ("stock", "plugin", "sm80") for kv in CACHES
    } <= names
    assert {job.model for job in planned} == {"packed16", "awq16"}
    assert {job.who for job in planned if not job.options["by_default"]} == {"stock"}, "its prompts with context need a weight"
    texts = [prompt(17, [1, 2]), prompt(3000, [3])]
    for per_head, passed in ((3017, True), (0, False)):  # prompts must be projected by kv_b_proj's own method
        ran = run_of(kit, "packed-stock-fp8-eager", texts, texts, texts, served="", per_head=0)
        ran |= run_of(kit, "packed-plugin-fp8-eager", texts, per_head=per_head)
        ran |= run_of(kit, "packed-sm80-fp8-eager", texts, per_head=0)
        lines = {line.name: line for line in kit.judge.other_models(ran, planned)}
        assert lines["packed-plugin-fp8-eager"].passed is passed and lines["packed-sm80-fp8-eager"].passed
        assert f"{per_head} tokens over keys" in lines["packed-plugin-fp8-eager"].found
        assert lines["awq-plugin-bf16-eager"].passed is False, "did not finish"


EMBEDDING, CACHES = "model.embed_tokens", ("bf16", "fp8")


def test_other_models_are_compared_with_stock_where_it_has_the_cache(kit: Any):
    """Else with Triton's kernels alone. An engine that nobody of ours served does not count."""
    planned = kit.jobs.other_models()
    texts = [prompt(17, [1, 2]), prompt(3000, [3])]
    far = [prompt(17, [1, 2], shift=0.5), prompt(3000, [3], shift=3.0)]
    ran = run_of(kit, "glm53-choice-bf16-eager", texts, served="") | run_of(kit, "glm53-plugin-bf16-eager", texts)
    ran |= run_of(kit, "glm53-triton-fp8-eager", texts) | run_of(kit, "glm53-plugin-fp8-graphs", far)
    ran |= run_of(kit, "glm53-sm89-bf16-eager", texts, served="")
    ran |= run_of(kit, "glm53-sm80-off", refused=["type fp8e4nv not supported in this architecture"])
    lines = {line.name: line for line in kit.judge.other_models(ran, planned)}
    assert lines["glm53-plugin-bf16-eager"].passed and "glm53-choice-bf16-eager" in lines["glm53-plugin-bf16-eager"].found
    assert (
        lines["glm53-plugin-fp8-graphs"].passed is False and "glm53-triton-fp8-eager" in lines["glm53-plugin-fp8-graphs"].found
    )
    assert lines["glm53-choice-bf16-eager"].passed is None and lines["glm53-sm89-bf16-eager"].passed is False
    assert lines["glm53-sm80-off"].passed and lines["hyv4-plugin-fp8-eager"].passed is False
    assert len(lines) == len(planned)


def test_an_engine_that_differs_from_itself_judges_no_other(kit: Any):
    planned = kit.jobs.other_models()
    texts, far = [prompt(17, [1, 2]), prompt(3000, [3])], [prompt(17, [1, 2], shift=0.3), prompt(3000, [3])]
    stock, ours = "hyv4-stock-bf16-eager", "hyv4-plugin-bf16-eager"
    for several, passed in (((texts, texts, far), (False, None)), ((texts, texts, texts), (None, True))):
        ran = run_of(kit, stock, *several, served="") | run_of(kit, ours, texts)
        lines = {line.name: line for line in kit.judge.other_models(ran, planned)}
        assert (lines[stock].passed, lines[ours].passed) == passed
        assert ("differs from itself" in lines[stock].found) is (passed[0] is False)
    assert {job.options["repeats"] for job in planned if job.name in ("hyv4-stock-fp8-eager", "glm53-choice-bf16-eager")} == {3}


def test_hy_v4_is_judged_by_stock_whose_decodes_wait_for_their_selection(kit: Any, tmp_path: Path):
    """As it is released it informs: a token that is far off between close ones is counted, and fails no engine."""
    planned = [job for job in kit.jobs.sinks() if "-fp8-" in job.name]
    assert {job.model for job in kit.jobs.sinks()} == {"sinks16"} and len(kit.jobs.sinks()) == 2 * len(planned)
    waits = {job.name.split("-")[1] for job in planned if job.options.get("waits")}
    assert waits == {"stock", "alone", "shadow"}
    assert all(job.options["waits"] for job in kit.jobs.other_models() if job.name.startswith("hyv4-stock"))
    texts, odd = [prompt(17, [1, 2]), prompt(3000, [3, 4, 5])], [prompt(17, [1, 2]), prompt(3000, [3, 4, 5])]
    odd[1]["logprobs"][1] = prompt(3000, [4], shift=0.3)["logprobs"][0]
    (tmp_path / "sinks-shadow-fp8-eager.shadow").write_text('{"layer": "a", "method": "forward_mqa", "relative": 0.002}')
    ran = run_of(kit, "sinks-stock-fp8-eager", texts, texts, texts, served="")
    ran |= run_of(kit, "sinks-released-fp8-eager", texts, odd, texts, served="")
    ran |= run_of(kit, "sinks-alone-fp8-eager", texts, texts, served="")
    ran |= run_of(kit, "sinks-plugin-fp8-eager", texts, texts, texts) | run_of(kit, "sinks-pluginalone-fp8-eager", texts)
    ran |= run_of(kit, "sinks-shadow-fp8-eager", texts)
    lines = {line.name.split("-")[1]: line for line in kit.judge.sinks(ran, planned, tmp_path)}
    passed = {who: line.passed for who, line in lines.items()}
    assert passed == {
        "stock": None,
        "released": None,
        "alone": True,
        "plugin": True,
        "pluginalone": True,
        "shadow": True,
    }
    assert "up to 1 tokens of a run off by more than 0.1" in lines["released"].found
    assert "up to 0 tokens of a run off" in lines["plugin"].found

    ran |= run_of(kit, "sinks-plugin-fp8-eager", texts, [prompt(17, [1, 2], shift=0.2), texts[1]], texts)
    (tmp_path / "sinks-shadow-fp8-eager.shadow").write_text('{"layer": "a", "method": "forward_mqa", "relative": 0.2}')
    del ran["sinks-alone-fp8-eager"]
    lines = {line.name.split("-")[1]: line for line in kit.judge.sinks(ran, planned, tmp_path)}
    assert [lines[who].passed for who in ("plugin", "shadow", "alone")] == [False, False, False]
    ran |= run_of(kit, "sinks-stock-fp8-eager", texts, [prompt(17, [1, 2], shift=0.2), texts[1]], served="")
    lines = {line.name.split("-")[1]: line for line in kit.judge.sinks(ran, planned, tmp_path)}
    assert lines["stock"].passed is False and lines["plugin"].passed is None, "nothing is judged by what differs from itself"


def test_a_stock_engine_that_vllm_has_no_backend_for_is_no_failure(kit: Any):
    """Its own words say so; any other error counts, and so does one of the plugin's."""
    name, ours = "glm53-choice-bf16-eager", "glm53-plugin-bf16-eager"
    planned, none = kit.jobs.other_models(), "ValueError: No valid attention backend found for NVIDIA H200"
    for failed, error, passed in ((name, none, None), (name, "RuntimeError: out of memory", False), (ours, none, False)):
        job = next(job for job in planned if job.name == failed)
        done = kit.judge.Done(job, {}, error)
        lines = {line.name: line for line in kit.judge.other_models({failed: done}, planned)}
        assert lines[failed].passed is passed


def test_older_gpus_are_rehearsed_with_both_models_and_both_caches(kit: Any):
    names = {job.name for job in kit.jobs.other_models()}
    cells = {f"{model}-{arch}-{kv}-eager" for model in ("glm53", "hyv4") for arch in ("sm80", "sm89") for kv in ("bf16", "fp8")}
    assert cells <= names and {"glm53-sm89-fp8-graphs", "hyv4-sm80-bf16-graphs", "glm53-sm80-off"} <= names
    for job in kit.jobs.other_models():
        assert job.arguments["kernel_config"] == {"enable_jit_warmup": False}
        linear = {"kda_prefill_backend": "triton"} if job.name.startswith("glm53") else None
        assert job.arguments.get("additional_config") == linear
        assert bool(job.rehearsal) == (job.who in ("sm80", "sm89"))
