# SPDX-License-Identifier: Apache-2.0
"""How ci/gpu_accuracy makes its model: text, questions, attention over chosen keys with its gradient, training, checkpoint."""

from __future__ import annotations

import json
import math
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mla_portable.judge.problems.selections import read_selections

ROOT = Path(__file__).parents[1]
TEXT = [path.read_text() for path in sorted((ROOT / "mla_portable" / "planner").glob("*.py"))]


@pytest.fixture(scope="module")
def text(accuracy: Any) -> Any:
    return accuracy.corpus.make_corpus(TEXT, 512, accuracy.questions.NEEDED)


# ------------------------------------------------------------------ text and questions


def test_text_is_the_same_wherever_its_files_lie(accuracy: Any, tmp_path: Path) -> None:
    for folder in ("one", "two/deep"):
        for number in range(6):
            file = tmp_path / folder / f"{number}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"# {number // 2}\n" + "text of a file\n" * 60)  # two files of each content
        (tmp_path / folder / "short.py").write_text("x = 1\n")
        (tmp_path / folder / "binary.txt").write_bytes(b"\xff" * 2000)
    one, two = (list(accuracy.corpus.documents([tmp_path / folder], 10_000, seed=1)) for folder in ("one", "two/deep"))
    assert one == two and len(one) == 3
    assert len(list(accuracy.corpus.documents([tmp_path / "one"], 900, seed=1))) == 1
    with pytest.raises(ValueError, match="characters of text below"):
        list(accuracy.corpus.documents([tmp_path / "one"], 1_000_000, seed=1))


def test_tokens_spell_the_text(accuracy: Any, text: Any) -> None:
    vocabulary, first = text.vocabulary, accuracy.corpus.BYTES + 256

    def spelt(tokens: list[int]) -> bytes:
        pieces = (vocabulary.pieces[t - first].encode() if t >= first else bytes([t - accuracy.corpus.BYTES]) for t in tokens)
        return b"".join(pieces)

    strange = "a  b\tc\n\n    café 中文 1234 __init__\x00 CamelCaseWORD…"
    for each in (strange, TEXT[0]):
        assert spelt(vocabulary.encode(each)) == each.encode()
    assert max(text.train.max(), text.held.max()) < 512 and len(vocabulary.pieces) == 512 - first
    assert len(vocabulary.encode(TEXT[0])) < 0.7 * len(TEXT[0].encode())
    with pytest.raises(ValueError, match="no room"):
        accuracy.corpus.make_corpus(TEXT, 280, accuracy.questions.NEEDED)


def test_a_sample_emphasises_answers_and_leaves_out_what_nobody_can_know(accuracy: Any, text: Any) -> None:
    questions = accuracy.questions
    tokens, weights = questions.sample(random.Random(0), text, 512, facts=1.0)
    assert tokens.shape == (513,) and weights.shape == (512,) and set(weights.tolist()) == {0.0, 1.0, 4.0}
    told = [tuple(each) for each in tokens[1:][weights == 0].reshape(-1, 4).tolist()]
    answers = [tuple(each[:4]) for each in tokens[1:][weights == 4].reshape(-1, 6).tolist()]
    assert len(told) == 4 and sorted(told) == sorted(answers)
    assert np.flatnonzero(weights == 0).max() < np.flatnonzero(weights == 4).min(), "facts come before questions"
    plain, weights = questions.sample(random.Random(0), text, 512, facts=0.0)
    assert (weights == 1).all() and plain.tolist() in [text.train[n : n + 513].tolist() for n in range(len(text.train) - 512)]


def test_prompts_end_in_a_question_about_what_is_at_their_depth(accuracy: Any, text: Any) -> None:
    questions = accuracy.questions
    wanted = questions.PromptSet(((16, 3),), ((256, 4),), (0.1, 0.8))
    prompts = questions.prompts(text, wanted, seed=3)
    assert prompts == questions.prompts(text, wanted, seed=3) and len(prompts) == 7
    assert all(len(prompt["tokens"]) == prompt["length"] for prompt in prompts)
    assert [prompt.get("depth") for prompt in prompts] == [None] * 3 + [0.1, 0.8] * 2
    for prompt in prompts[3:]:
        tokens, answer = prompt["tokens"], prompt["answer"]
        assert len(answer) == 4
        places = [n for n in range(256) if tokens[n : n + 4] == answer]
        name = tokens[-4:]  # two words, `opens`, `with`
        asked = [n for n in places if tokens[n - 4 : n] == name]
        assert len(asked) == 1 and abs(asked[0] / 256 - prompt["depth"]) < 0.1
    with pytest.raises(ValueError, match="too few"):
        questions.prompts(text, questions.PromptSet(((10**6, 1),), (), ()), seed=0)


# ------------------------------------------------------------------ attention over chosen keys


def test_attention_over_chosen_keys_has_the_gradient_of_a_mask(accuracy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = accuracy.chosen_keys
    monkeypatch.setattr(chosen, "_ROWS", 12)  # several spans
    heads, length, topk = 3, 40, 8
    q, k, v = (torch.randn(heads, length, width, dtype=torch.float64, requires_grad=True) for width in (6, 6, 4))
    index = torch.randn(length, 2, 5), torch.randn(length, 5), torch.randn(length, 2)
    keys, seen = chosen.choose(*index, topk)
    scores = chosen.index_scores(*index)
    for row in range(length):
        best = scores[row, : row + 1].topk(min(topk, row + 1)).values
        mine = keys[row][seen[row]]
        assert len(set(keys[row].tolist())) == topk and mine.max() <= row
        torch.testing.assert_close(scores[row][mine].sort(descending=True).values, best)  # which of two zeros it is is open
    mask = torch.zeros(length, length, dtype=torch.bool).scatter_(1, keys, seen)
    out, shares = chosen.attend(q, k, v, keys, seen, 0.4)
    p = (q @ k.mT * 0.4).masked_fill(~mask, -math.inf).softmax(-1)
    upstream = torch.randn_like(out)
    torch.testing.assert_close(out, p @ v, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(shares, p.mean(0).gather(1, keys).float())
    ours, theirs = (torch.autograd.grad(each, (q, k, v), upstream) for each in (out, p @ v))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_indexer_learns_from_attention_on_the_keys_that_it_sees(accuracy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = accuracy.chosen_keys
    monkeypatch.setattr(chosen, "_ROWS", 12)
    length = 40
    index = tuple(torch.randn(shape, requires_grad=True) for shape in ((length, 2, 5), (length, 5), (length, 2)))
    q, k = torch.randn(3, length, 6), torch.randn(3, length, 6)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    p = (q @ k.mT * 0.4).masked_fill(~causal, -math.inf).softmax(-1).mean(0)
    log_q = chosen.index_scores(*index).masked_fill(~causal, -math.inf).log_softmax(-1)
    wanted = torch.nn.functional.kl_div(log_q.masked_fill(~causal, 0.0), p, reduction="sum") / length
    got = chosen.loss_on_all(q, k, *index, 0.4)
    torch.testing.assert_close(got, wanted)
    everything = torch.arange(length).expand(length, -1)
    on_chosen = chosen.loss_on_chosen(*index, everything, causal, p)
    torch.testing.assert_close(on_chosen, wanted)
    ours, same, theirs = (torch.autograd.grad(each, index, retain_graph=True) for each in (got, on_chosen, wanted))
    for one, two, other in zip(ours, same, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(two, other, rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------ training and the checkpoint


@pytest.mark.parametrize("name", ["v32", "glm5"])
def test_training_is_seeded_and_each_stage_teaches_its_part(accuracy: Any, text: Any, name: str) -> None:
    form = accuracy.forms.toy(accuracy.forms.FORMS[name])

    def trained(stages: Any) -> tuple[Any, list[dict[str, Any]]]:
        torch.manual_seed(1)
        network = accuracy.network.Network(form)
        return network, accuracy.training.train(network, text, stages, seed=1, seconds=600)

    dense, warm, sparse = accuracy.training.TOY
    first, _ = trained([dense])
    second, log = trained([dense, warm])
    third, again = trained([dense, warm, sparse])
    changed = [
        {n for (n, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True) if not torch.equal(a, b)}
        for one, other in ((first, second), (second, third))
    ]
    names = {name for name, _ in first.named_parameters()}
    indexers = {name for name in names if ".indexer." in name}
    assert changed[0] == indexers and changed[1] >= indexers and len(changed[1]) > 0.9 * len(names)
    volatile = ("seconds", "tokens_s")
    kept = [[{key: value for key, value in row.items() if key not in volatile} for row in each] for each in (log, again)]
    assert kept[1][:2] == kept[0], "the same seed, the same losses"
    assert again[0]["text"] < 6.5 and again[1]["indexer"] < 0.7 and again[2]["indexer"] is not None
    assert len(indexers) // 5 == sum(form.indexed)


def test_a_stage_ends_when_its_time_is_over(accuracy: Any, text: Any) -> None:
    form = accuracy.forms.toy(accuracy.forms.V32)
    stage = accuracy.training.TOY[0]
    long = accuracy.training.Stage(**{**vars(stage), "steps": 10_000, "share": 1.0})
    begin = time.monotonic()
    (row,) = accuracy.training.train(accuracy.network.Network(form), text, [long], seed=1, seconds=0.3)
    assert 1 <= row["step"] < 1000 and time.monotonic() - begin < 20


def test_a_checkpoint_comes_in_parts_and_back(accuracy: Any, tmp_path: Path) -> None:
    form = accuracy.forms.toy(accuracy.forms.GLM5)
    state = accuracy.network.Network(form).state_dict()
    names = accuracy.stored.write_checkpoint(tmp_path, form.config(), state, part_bytes=64 << 10)
    parts = [name for name in names if name.endswith(".safetensors")]
    assert len(parts) > 2 and all((tmp_path / name).stat().st_size < 80 << 10 for name in parts)
    back = accuracy.stored.read_checkpoint(tmp_path)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], value.to(torch.bfloat16)) for name, value in state.items())
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["index_topk_pattern"] == "FSF" and config["indexer_types"] == ["full", "shared", "full"]
    with pytest.raises(ValueError, match="a part at most"):
        accuracy.stored.write_checkpoint(tmp_path, form.config(), state, part_bytes=1 << 10)


@pytest.mark.parametrize("name", ["v32", "glm5"])
def test_a_whole_checkpoint_has_the_models_dimensions_and_fits_eight_files(accuracy: Any, name: str) -> None:
    form = accuracy.forms.FORMS[name]
    with torch.device("meta"):
        sizes = [2 * value.numel() for value in accuracy.network.Network(form).state_dict().values()]
    assert sum(sizes) < 62 << 20 and max(sizes) < accuracy.stored.PART_BYTES
    config = form.config()
    dims = [config[key] for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim")]
    assert dims == ([512, 64, 128, 128, 128] if name == "v32" else [512, 64, 192, 256, 128])
    assert config["index_topk"] == 256 and config["max_position_embeddings"] > 32_768 + 8


def test_the_slope_of_a_text_is_what_another_scale_makes_of_it(accuracy: Any) -> None:
    torch.manual_seed(2)
    network = accuracy.network.Network(accuracy.forms.toy(accuracy.forms.V32)).double().requires_grad_(False)
    ids = torch.randint(2, 512, (24,))
    slopes = torch.tensor(accuracy.own_answers.scale_slopes(network, ids.tolist()))

    def logprobs(stretch: float) -> torch.Tensor:
        return network(ids[None, :-1], "dense", stretch=stretch)[0][0].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]

    apart = (logprobs(1.002) - logprobs(0.998)) / math.log(1.002 / 0.998)
    assert slopes.abs().max() > 1e-3
    torch.testing.assert_close(slopes.double(), apart, rtol=0.02, atol=1e-4)


def test_what_its_indexers_choose_is_kept_for_benchmarks(accuracy: Any, tmp_path: Path) -> None:
    for form, wide in ((accuracy.forms.V32, False), (accuracy.forms.GLM5, False), (accuracy.forms.V32, True)):
        small = accuracy.forms.toy(form)
        small = replace(small, index_dim=128) if wide else small
        network = accuracy.network.Network(small).requires_grad_(False)
        path = tmp_path / f"{form.name}-{wide}.npz"
        accuracy.own_selections.write_own_selections(path, network, range(128), made="a test")
        found = read_selections(path)
        layers = [number for number, own in enumerate(small.indexed) if own]
        assert found.layers.tolist() == layers and found.topk == small.topk and found.made == "a test"
        assert found.seen.tolist() == [*range(51, 79), *range(101, 129)] and len(list(found.runs())) == 2
        assert (found.index is not None) == wide
        if wide:
            # the inputs of the indexer give the choice of its rows
            index = found.index
            scores = torch.einsum("ishd,ind->ishn", index.queries.float(), index.keys.float()).relu()
            scores = (scores * index.weights[..., None]).sum(2)
            scores.masked_fill_(torch.arange(128) >= torch.from_numpy(index.seen)[:, None], -math.inf)
            wanted = scores.topk(small.topk).indices.sort().values
            chosen = (
                torch.from_numpy(found.positions[[layers.index(n) for n in index.layers], -index.seen.size :]).sort().values
            )
            assert (wanted == chosen).float().mean() > 0.9, "but for the rounding of inputs"
