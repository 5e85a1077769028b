# SPDX-License-Identifier: Apache-2.0
"""`ci/gpu_vllm --transformers` on a CPU: the truth of a small checkpoint, what is near to it, what is not, and the verdicts."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from mla_portable import use

LENGTHS, TOKENS = (17, 70), 3
SELECTS = {"overrides": {"index_topk": 64}}
"""The longer prompt is longer than what is selected."""


@pytest.fixture(scope="module")
def checkpoints(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for model in kit.jobs.HELD_AGAINST_TRANSFORMERS.values():
        kit.named_models.write_model(folder, model)
    return folder


def generated(kit: Any, checkpoints: Path, name: str, **options: Any) -> Any:
    """The run of a job of the suite, at toy size."""
    (job,) = (job for job in kit.jobs.transformers() if job.name == name)
    small = replace(job, options={**job.options, "lengths": LENGTHS, "tokens": TOKENS, **options})
    with use("reference"):
        (run,) = kit.transformers_truth.generate(small, checkpoints, checkpoints)["runs"]
    return run


def test_the_function_is_the_truth_in_float32_and_near_it_in_bf16(kit: Any, checkpoints: Path):
    """GLM-5's form, with a layer that shares a selection."""
    truth = generated(kit, checkpoints, "glm5-truth-exact", **SELECTS)
    assert [(len(p["tokens"]), len(p["logprobs"]), len(p["logprobs"][0])) for p in truth] == [(3, 3, 20)] * 2
    same = kit.judge.distance(generated(kit, checkpoints, "glm5-function-bf16", dtype="float32", **SELECTS), truth)
    assert (same.equal, same.compared) == (6, 6) and same.largest < 1e-3
    near = kit.judge.distance(generated(kit, checkpoints, "glm5-function-bf16", **SELECTS), truth)
    assert near.within(*kit.judge.FROM_TRUTH["auto"]) and near.largest > 1e-3


def test_a_truth_of_fp8_is_near_the_exact_one_and_a_wrong_selection_is_not(kit: Any, checkpoints: Path):
    truth = generated(kit, checkpoints, "v32-truth-exact")
    fp8 = [generated(kit, checkpoints, f"v32-truth-{scales}") for scales in ("pow2", "amax")]
    limits, apart = kit.judge.FROM_TRUTH["fp8_ds_mla"], [kit.judge.distance(run, truth) for run in fp8]
    assert all(each.within(*limits) and each.largest > 1e-2 for each in apart) and apart[0] != apart[1], apart
    fewer = kit.judge.distance(generated(kit, checkpoints, "v32-truth-exact", overrides={"index_topk": 40}), truth)
    assert not fewer.within(*limits), fewer


def test_the_kits_limit_lies_between_rounding_and_lost_keys_for_glm5(kit: Any, checkpoints: Path):
    """`ci/gpu_vllm --glm5` has the limit of DeepSeek-V3.2: an FP8 cache is within it, eight of 70 keys lost are not."""
    truth = generated(kit, checkpoints, "glm5-truth-exact")
    rounded = kit.judge.agree(generated(kit, checkpoints, "glm5-truth-amax"), truth)
    assert rounded.within(kit.judge.TOLERANCE) and rounded.difference > 1e-2, rounded
    fewer = kit.judge.agree(generated(kit, checkpoints, "glm5-truth-exact", overrides={"index_topk": 62}), truth)
    assert not fewer.within(kit.judge.TOLERANCE), fewer


def test_rounded_scores_choose_other_keys(kit: Any, checkpoints: Path):
    job = next(job for job in kit.jobs.transformers() if job.name == "v32-truth-exact")
    model = kit.transformers_truth.load(checkpoints / job.model, {**job.options, **SELECTS})
    ids, found = torch.randint(2, 4096, (1, 90), generator=torch.Generator().manual_seed(1)), list[torch.Tensor]()
    indexer = model.model.layers[0].self_attn.indexer
    indexer.register_forward_hook(lambda module, given, chosen: found.append(chosen[0, 64:].sort().values))
    with torch.no_grad():
        model(ids)
        assert kit.transformers_truth.round_scores(model) == 2
        model(ids)
    exact, rounded = found
    swapped = (exact[:, :, None] != rounded[:, None, :]).all(-1).float().mean()
    assert 0 < swapped < 0.05


def test_a_checkpoint_that_does_not_fit_is_refused(kit: Any, checkpoints: Path):
    with pytest.raises(RuntimeError, match="does not fit"):
        generated(kit, checkpoints, "v32-truth-exact", overrides={"num_hidden_layers": 1})


def test_the_suite_holds_every_engine_against_a_truth_of_its_cache(kit: Any):
    several = {job.name: job for job in kit.jobs.transformers()}
    assert {(job.who, job.kv, job.model) for job in several.values() if job.task == "generate"} == {
        (who, kv, model) for who in ("stock", "plugin") for kv in kit.jobs.KV_DTYPES for model in ("heads16", "shares16")
    }
    texts = {(tuple(job.options["lengths"]), job.options["tokens"]) for job in several.values()}
    assert len(texts) == 1, "all are over the same prompts"
    assert {job.options["fp8"] for job in several.values() if job.name.startswith("v32-truth-")} == {"", "pow2", "amax"}


def test_prompts_over_keys_of_each_head_are_held_against_the_exact_truth(kit: Any):
    """Of GLM-5 too, whose keys and values have 256 numbers."""
    default = {(job.who, job.model, job.kv) for job in kit.jobs.transformers() if job.options.get("by_default")}
    assert default == {(who, model, "auto") for who in ("stock", "plugin") for model in ("heads16", "shares16")}


def prompt(length: int, *shifts: float, token: int = 5) -> dict[str, Any]:
    """A text whose likeliest token is at -1 + shift at each place; the runner-up is 0.3 below."""
    return {"length": length, "tokens": [token] * len(shifts), "logprobs": [{"5": s - 1.0, "6": s - 1.3} for s in shifts]}


def test_engines_are_judged_by_the_nearer_truth_and_long_prompts_beside_stock(kit: Any):
    planned = {job.name: job for job in kit.jobs.transformers() if job.name.startswith("v32-")}

    def judged(per_head: int = 5, **runs: Any) -> dict[str, Any]:
        texts = {
            "truth_exact": [prompt(17, 0.0, 0.0), prompt(3000, 0.0)],
            "truth_pow2": [prompt(17, 0.0, 0.1), prompt(3000, 0.0)],
            "truth_amax": [prompt(17, 0.5, 0.5), prompt(3000, 0.0)],
            "stock_bf16": [prompt(17, 0.01, 0.02), prompt(3000, 0.4)],
            "plugin_bf16": [prompt(17, 0.02, 0.01), prompt(3000, 0.5)],
            "stock_fp8": [prompt(17, 0.05, 0.1), prompt(3000, 0.4)],
            "plugin_fp8": [prompt(17, 0.05, 0.1), prompt(3000, 0.4)],
            "function_bf16": [prompt(17, 0.02, 0.01), prompt(3000, 0.5)],
            "stock_default": [prompt(17, 0.01, 0.02), prompt(3000, 0.4)],
            "plugin_default": [prompt(17, 0.02, 0.01), prompt(3000, 0.5)],
        } | runs
        ran = {}
        for name, run in texts.items():
            job = planned[f"v32-{name.replace('_', '-')}"]
            result = {} if run is None else {"runs": [run], "by": "transformers", "per_head": per_head}
            ran[job.name] = kit.judge.Done(job, result, "" if run else "exit 1", "nvidia.flashmla")
        return {line.name: line.passed for line in kit.judge.transformers(ran, list(planned.values()))}

    right = judged()
    assert len(right) == len(planned) and {name for name, passed in right.items() if passed is not True} == {
        "v32-truth-exact", "v32-truth-pow2", "v32-truth-amax"
    }  # fmt: skip
    for change in (
        {"plugin_bf16": [prompt(17, 0.1, 0.1), prompt(3000, 0.4)]},
        {"plugin_bf16": [prompt(17, 0.0, 0.0), prompt(3000, 0.6)]},
        {"plugin_bf16": [prompt(17, float("nan"), 0.0), prompt(3000, 0.4)]},
        {"plugin_fp8": [prompt(17, 0.45, 0.1), prompt(3000, 0.4)]},
        {"function_bf16": [prompt(17, 0.0, 0.0, token=9), prompt(3000, 0.4)]},
        {"stock_bf16": None},
    ):
        (name,) = change
        assert judged(**change)[f"v32-{name.replace('_', '-')}"] is False, change
    elsewhere = {name for name, passed in judged(per_head=0).items() if passed is False}
    assert elsewhere == {"v32-plugin-default"}, "prompts must have gone over keys of each head"
    assert judged(plugin_default=[prompt(17, 0.0, 0.0), prompt(3000, 0.6)])["v32-plugin-default"] is False
    assert judged(function_bf16=None)["v32-function-bf16"] is False
    lost = judged(truth_exact=None)
    assert lost["v32-truth-exact"] is False and lost["v32-plugin-bf16"] is False and lost["v32-plugin-fp8"] is True


def test_texts_may_part_where_the_truth_is_a_tie(kit: Any):
    truth, run = [prompt(17, 0.0, 0.0)], [prompt(17, 0.0, 0.0, token=6)]
    found = kit.judge.distance(run, truth)
    assert (found.compared, found.equal) == (1, 0) and found.torn == pytest.approx(0.3)
    assert found.within(0.1, 0.2) and not found.within(0.1, 0.1)


def test_of_a_decode_the_sum_over_heads_is_not_rounded(kit: Any):
    """Its operands have the form of queries and keys, but for their width."""
    truth, draw = kit.transformers_truth, torch.Generator().manual_seed(2)
    q, k = torch.randn(1, 1, 64, 128, generator=draw), torch.randn(1, 1, 128, 9, generator=draw)
    weights, scores = torch.randn(1, 1, 1, 64, generator=draw), torch.randn(1, 1, 64, 9, generator=draw)
    with truth._Fp8Scores():
        rounded, summed = torch.matmul(q, k), torch.matmul(weights, scores)
    want = truth.through_e4m3(q, -1, least=1e-10, pow2=True) @ truth.through_e4m3(k, -2, least=1e-4, pow2=True)
    assert torch.equal(rounded, want) and not torch.equal(rounded, q @ k)
    assert torch.equal(summed, weights @ scores)
