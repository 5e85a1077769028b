# SPDX-License-Identifier: Apache-2.0
"""What ci/gpu_accuracy concludes: engines that round otherwise pass, planted faults are seen, and the command from end to end.

The engines are the trained network itself at toy size, in plain torch, with what an engine may do wrong; in the command's own
test a stand-in for vLLM in processes of their own.
"""

from __future__ import annotations

import json
import math
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from accuracy_page import accuracy_tables
from torch import Tensor

from mla_portable.capability.run import read_run

ROOT = Path(__file__).parents[1]
LENGTHS: Final = (16, 96)


# ------------------------------------------------------------------ engines in plain torch


@pytest.fixture(scope="module")
def judged(accuracy: Any) -> SimpleNamespace:
    """A network whose attention is as peaked as a trained one's, prompts, and their slopes."""
    torch.manual_seed(0)
    form = accuracy.forms.toy(accuracy.forms.V32)
    network = accuracy.network.Network(form).requires_grad_(False)
    for layer in network.model["layers"]:
        layer.self_attn.q_b_proj.weight *= 3
        layer.self_attn.o_proj.weight *= 8
    draw = torch.Generator().manual_seed(1)
    prompts: list[dict[str, Any]] = []
    for length, count in zip(LENGTHS, (60, 30), strict=True):
        for number in range(count):
            tokens = torch.randint(2, form.vocab, (length,), generator=draw).tolist()
            prompts.append({"length": length, "tokens": tokens})
            if length == 16:
                prompts[-1]["slopes"] = accuracy.own_answers.scale_slopes(network, tokens)
            else:
                prompts[-1] |= {"depth": (0.2, 0.7)[number % 2], "answer": [number, 3]}
    return SimpleNamespace(network=network, prompts=prompts)


def engine(
    accuracy: Any,
    judged: SimpleNamespace,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    rounding: float = 2**-8,
    scale: float = 1.0,
    change: Callable[[Tensor], Tensor] | None = None,
    turned: str = "",
    missed: int = 0,
) -> list[dict[str, Any]]:
    """What an engine leaves that rounds attention's output as another does. missed: answers that it does not know."""
    draw = torch.Generator().manual_seed(seed)
    network, module = judged.network, accuracy.network
    rounds = [
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda _, given: (given[0] * (1 + rounding * (2 * torch.rand(given[0].shape, generator=draw) - 1)),)
        )
        for layer in network.model["layers"]
    ]
    choose, rotated = module.choose, module.rotated

    def wrongly_chosen(*given: Any) -> tuple[Tensor, Tensor]:
        keys, seen = choose(*given)
        assert change is not None
        found = change(torch.where(seen, keys, -1))
        seen = found >= 0
        seen[:, 0] |= ~seen.any(1)
        return torch.where(seen, found.clamp(min=0), keys), seen

    def wrongly_rotated(x: Tensor, table: Tensor, *, pairs: bool) -> Tensor:
        return rotated(x, table, pairs=pairs != (pairs == (turned == "rope")))

    with monkeypatch.context() as patch:
        if change is not None:
            patch.setattr(module, "choose", wrongly_chosen)
        if turned:
            patch.setattr(module, "rotated", wrongly_rotated)
        found: list[dict[str, Any]] = []
        for length in LENGTHS:  # of each the prompts follow one another
            several = [prompt for prompt in judged.prompts if prompt["length"] == length]
            ids = torch.tensor([prompt["tokens"] for prompt in several])
            with torch.inference_mode():
                logits = network(ids[:, :-1], "chosen", stretch=scale)[0]
            own = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].tolist()
            for row, prompt in zip(own, several, strict=True):
                found.append({"logprobs": row, "tokens": [*prompt.get("answer", ()), 9], "decoded": []})
        for each in found[-missed:] if missed else ():
            each["tokens"] = [1, 1, 1]
    for hook in rounds:
        hook.remove()
    return found


def verdict(accuracy: Any, judged: SimpleNamespace, **engines: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Name -> lines. engines: by name, with "_" for "-"; stock's two are always there."""
    known = {asked.name: asked for asked in accuracy.asked_engines.engines("v32")}
    done: dict[Any, Any] = {}
    for name, scored in engines.items():
        asked = known[f"v32-{name.replace('_', '-')}".replace("index-rope", "index_rope")]
        result = {"prompts": scored, "per_head": 7 * asked.per_head} if scored else {}
        log = "fused: sparse_decode triton.portable"
        done[asked] = accuracy.judge.Done(asked.job(16), result, "" if scored else "exit 1", log)
    found: dict[str, list[Any]] = {}
    given = accuracy.verdict.Verdict(done, judged.prompts)
    for line in given.lines():
        found.setdefault(line.name.removeprefix("v32-").replace("-", "_"), []).append(line)
    found["records"] = list(given.records("vllm 9"))
    return found


@pytest.fixture(scope="module")
def stock(accuracy: Any, judged: SimpleNamespace) -> dict[str, list[dict[str, Any]]]:
    names = ("stock_bf16_latent", "stock_bf16_latent_small")
    return {name: engine(accuracy, judged, seed, pytest.MonkeyPatch()) for seed, name in enumerate(names)}


def test_an_engine_that_rounds_otherwise_passes(
    accuracy: Any, judged: SimpleNamespace, stock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = verdict(accuracy, judged, **stock, plugin_bf16_latent=engine(accuracy, judged, 7, monkeypatch))
    assert [line.passed for line in lines["plugin_bf16_latent"]] == [True, True], lines["plugin_bf16_latent"]
    assert [line.passed for line in lines["stock_bf16_latent"]] == [True, None, None]
    assert "answers 30 of 30 at 96" in lines["stock_bf16_latent"][0].found.replace("the model ", "")
    (short, long) = lines["plugin_bf16_latent"]
    assert "scale" in short.found and "scale" not in long.found and "answers 30/30" in long.found
    records = {(r.backend, r.variant, r.length): r for r in lines["records"]}
    assert len(records) == 6 and records["stock", "", 96].mean is None and records["plugin", "", 96].mean > 0
    assert records["plugin", "", 96].right == {"20": 15, "70": 15} == records["plugin", "", 96].asked
    assert abs(records["plugin", "", 16].scale) < 0.01


def test_every_planted_fault_is_seen(
    accuracy: Any, judged: SimpleNamespace, stock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = accuracy.faults

    def wrong(seed: int, **mistakes: Any) -> list[dict[str, Any]]:
        return engine(accuracy, judged, seed, monkeypatch, **mistakes)

    planted = {
        "scale": wrong(20, scale=faults.SCALE),
        "dropped": wrong(21, change=faults.dropped),
        "shifted": wrong(22, change=faults.shifted),
        "rope": wrong(23, turned="rope"),
        "index_rope": wrong(24, turned="index_rope"),
    }
    assert tuple(planted) == faults.FAULTS
    lines = verdict(accuracy, judged, **stock, **{f"plugin_bf16_latent_{name}": each for name, each in planted.items()})
    for name in planted:
        (line,) = lines[f"plugin_bf16_latent_{name}"]
        assert line.passed and line.found.startswith("seen at "), line
    scale = next(r.scale for r in lines["records"] if r.variant == "scale" and r.length == 16)
    assert scale == pytest.approx(0.02, abs=0.004), "it is measured, not only seen"
    # a fault that is none is not seen, and that fails
    (missed,) = verdict(accuracy, judged, **stock, plugin_bf16_latent_scale=wrong(25))["plugin_bf16_latent_scale"]
    assert missed.passed is False and missed.found.startswith("NOT SEEN")


def test_what_an_engine_does_wrong_fails(
    accuracy: Any, judged: SimpleNamespace, stock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def passed(name: str = "plugin_bf16_latent", **mistakes: Any) -> list[bool | None]:
        found = verdict(accuracy, judged, **stock, **{name: engine(accuracy, judged, 7, monkeypatch, **mistakes)})
        return [line.passed for line in found[name]]

    assert passed(rounding=2**-6) == [False, False]
    assert passed(missed=1) == [True, True] and passed(missed=2) == [True, False]
    broken = [{**each, "logprobs": [math.nan, *each["logprobs"][1:]]} for each in stock["stock_bf16_latent"]]
    lines = verdict(accuracy, judged, **stock, plugin_bf16_latent=broken)
    assert [line.passed for line in lines["plugin_bf16_latent"]] == [False, False]
    assert not [record for record in lines["records"] if record.backend == "plugin"], "no figure of what is no number"
    assert [line.passed for line in verdict(accuracy, judged, plugin_bf16_latent=broken)["plugin_bf16_latent"]] == [False] * 2
    alone = {"stock_bf16_latent": stock["stock_bf16_latent"]}
    lines = verdict(accuracy, judged, **alone, plugin_bf16_latent=stock["stock_bf16_latent"])["plugin_bf16_latent"]
    assert [line.passed for line in lines] == [False] * 2 and "nothing says how stock differs from itself" in lines[0].found
    unusable = {**stock, "stock_bf16_latent_small": broken}
    lines = verdict(accuracy, judged, **unusable, plugin_bf16_latent=stock["stock_bf16_latent"])["plugin_bf16_latent"]
    assert [line.passed for line in lines] == [False] * 2, "a stock without numbers is no measure"
    other = {**stock, "stock_bf16_latent_small": engine(accuracy, judged, 5, monkeypatch, rounding=0.5)}
    wide = engine(accuracy, judged, 6, monkeypatch, rounding=0.5)
    lines = verdict(accuracy, judged, **other, plugin_bf16_latent=wide)["plugin_bf16_latent"]
    assert [line.passed for line in lines] == [False] * 2 and "above 0.1" in lines[0].found
    lines = verdict(accuracy, judged, **stock, plugin_bf16_latent=[], stock_fp8_latent_small=[], stock_fp8_latent=[])
    assert lines["plugin_bf16_latent"][0].passed is lines["stock_fp8_latent"][0].passed is False
    assert lines["stock_fp8_latent_small"][0].passed is None


def test_a_model_that_does_not_answer_is_no_judge(accuracy: Any, judged: SimpleNamespace, stock: Any) -> None:
    unable = {**stock, "stock_bf16_latent": [{**each, "tokens": [1, 1, 1]} for each in stock["stock_bf16_latent"]]}
    line = verdict(accuracy, judged, **unable)["stock_bf16_latent"][0]
    assert line.passed is False and "answers 0 of 30" in line.found


def test_engines_cover_what_is_judged(accuracy: Any) -> None:
    several = accuracy.asked_engines.engines("v32")
    assert len({asked.name for asked in several}) == len(several)
    plain = {(asked.who, asked.cache, asked.per_head) for asked in several if not asked.variant}
    for cache in ("bf16", "fp8"):
        assert plain >= {(who, cache, way) for who in ("stock", "plugin", "triton") for way in (True, False)}
        assert plain >= {(who, cache, True) for who in ("sm80", "sm89")}
    assert {asked.fault for asked in several} == {"", *accuracy.faults.FAULTS}
    for asked in several:
        job = asked.job(16)
        given = job.llm_arguments(Path("checkpoints"))
        assert given["model"] == "checkpoints/v32" and given["max_model_len"] >= 32_768 + job.options["tokens"]
        assert (
            job.task in accuracy.engine.TASKS
            and job.options["by_default"] is asked.per_head
            and bool(job.rehearsal) == (asked.who in ("sm80", "sm89"))
        )
    lengths = [length for length, _ in accuracy.questions.FULL.asked]
    assert lengths[0] == 4096 and lengths[-1] == 32_768 and accuracy.questions.FULL.asked[0][1] == 24


def test_faults_change_what_a_layer_is_given_and_nothing_else(accuracy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Impl:
        def __init__(self, **arguments: Any) -> None:
            self.scale, self.topk_indices_buffer = arguments["scale"], torch.tensor([[5, 0, 7], [2, -1, -1]])

        def forward_mqa(self) -> list[list[int]]:
            return self.topk_indices_buffer.tolist()

        forward_mha = forward_mqa

    def planted(fault: str) -> Any:
        wrong = type("Impl", (Impl,), {})
        monkeypatch.setitem(sys.modules, "mla_portable.engines.vllm.impl", SimpleNamespace(MLAPortableImpl=wrong))
        accuracy.faults.plant(fault)
        return wrong(scale=2.0)

    for fault, keys in {"dropped": [[5, 0, -1], [2, -1, -1]], "shifted": [[4, -1, 6], [1, -1, -1]]}.items():
        layer = planted(fault)
        assert layer.forward_mqa() == layer.forward_mha() == keys and layer.scale == 2.0
        assert layer.topk_indices_buffer.tolist() == [[5, 0, 7], [2, -1, -1]], "the next layer's fault would be another"
    assert planted("scale").scale == 2.0 * accuracy.faults.SCALE and planted("rope").scale == 2.0
    with pytest.raises(ValueError, match="no fault 'other'"):
        accuracy.faults.plant("other")
    model = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])
    for module, style in zip(model, (True, False), strict=True):
        module.is_neox_style = style
    accuracy.faults.turn("index_rope", model)
    assert [module.is_neox_style for module in model] == [False, False]
    accuracy.faults.turn("scale", model)
    with pytest.raises(RuntimeError, match="none has the style"):
        accuracy.faults.turn("index_rope", model)


# ------------------------------------------------------------------ the command, with a stand-in for vLLM


class Impl:
    def forward_mha(self, q: Tensor) -> None: ...


class StandIn:
    """`vllm.LLM`: the checkpoint in plain torch. Each rounds by its backend, its cache and the size of its steps."""

    def __init__(self, accuracy: Any, model: str, attention_config: Any = None, **given: Any) -> None:
        form = accuracy.forms.toy(accuracy.forms.FORMS[Path(model).name])
        self._module, self._network = accuracy.network, accuracy.network.Network(form).requires_grad_(False)
        self._network.load_state_dict({n: value.float() for n, value in accuracy.stored.read_checkpoint(Path(model)).items()})
        self._per_head, self._rotation = attention_config is None, torch.nn.Identity()
        self._rotation.is_neox_style = False
        kind = [given[name] for name in ("attention_backend", "kv_cache_dtype", "max_num_batched_tokens")]
        self._draw = torch.Generator().manual_seed(zlib.crc32(f"{kind}".encode()))
        for layer in self._network.model["layers"]:
            layer.self_attn.o_proj.register_forward_pre_hook(self._rounded)
        runner = SimpleNamespace(get_model=lambda: torch.nn.ModuleList([self._rotation]))
        worker = SimpleNamespace(driver_worker=SimpleNamespace(worker=SimpleNamespace(model_runner=runner)))
        self._layer = SimpleNamespace(impl=Impl())
        static = SimpleNamespace(static_forward_context={"layer": self._layer})
        config = SimpleNamespace(compilation_config=static)
        self.llm_engine = SimpleNamespace(model_executor=worker, vllm_config=config)

    def _rounded(self, module: Any, given: tuple[Tensor]) -> tuple[Tensor]:
        return (given[0] * (1 + 2**-8 * (2 * torch.rand(given[0].shape, generator=self._draw) - 1)),)

    def generate(self, prompts: list[dict[str, list[int]]], wanted: Any, use_tqdm: bool) -> list[Any]:
        assert wanted.prompt_logprobs == 0 and not use_tqdm
        with pytest.MonkeyPatch.context() as patch:
            if self._rotation.is_neox_style:  # a fault, planted
                turn = self._module.rotated
                patch.setattr(self._module, "rotated", lambda x, table, pairs: turn(x, table, pairs=False))
            return [self._output(prompt["prompt_token_ids"], wanted.max_tokens) for prompt in prompts]

    @torch.inference_mode()
    def _output(self, prompt: list[int], count: int) -> Any:
        if self._per_head:
            self._layer.impl.forward_mha(torch.tensor(prompt))
        logprobs = self._network(torch.tensor([prompt]), "chosen")[0][0].log_softmax(-1)
        own = [None, *({t: SimpleNamespace(logprob=float(at[t]))} for t, at in zip(prompt[1:], logprobs, strict=False))]
        likeliest = int(logprobs[-1].argmax())
        text = [{likeliest: SimpleNamespace(logprob=float(logprobs[-1].max()))}] * count
        outputs = [SimpleNamespace(token_ids=(likeliest,) * count, logprobs=text)]
        return SimpleNamespace(prompt_token_ids=prompt, prompt_logprobs=own, outputs=outputs)


@pytest.fixture
def started(accuracy: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The jobs whose engines were started: stand-ins, in this process, by what a process is given."""
    config = SimpleNamespace(AttentionConfig=type("AttentionConfig", (), {"sparse_mla_force_mqa": None}))
    vllm = SimpleNamespace(LLM=lambda **given: StandIn(accuracy, **given), SamplingParams=SimpleNamespace)
    for name, module in {"vllm": vllm, "vllm.config": SimpleNamespace(), "vllm.config.attention": config}.items():
        monkeypatch.setitem(sys.modules, name, module)
    found: list[str] = []

    def run_logged(command: list[str], log: Path, environ: dict[str, str], seconds: float) -> str:
        given, result, checkpoints = map(Path, command[2:])
        job = accuracy.jobs.Job(**json.loads(given.read_text()))
        found.append(job.name)
        served = environ["MLA_PORTABLE_VLLM"] != "off"
        log.write_text("mla_portable serves 3 layers by route fused: sparse_decode triton.portable; cache\n" * served)
        result.write_text(json.dumps(accuracy.engine.TASKS[job.task](job, checkpoints, result.parent)))
        return "exit 0"

    monkeypatch.setattr(accuracy.kit, "run_logged", run_logged)
    known = accuracy.command.metadata.version
    monkeypatch.setattr(accuracy.command.metadata, "version", lambda name: "9.9" if name == "vllm" else known(name))
    monkeypatch.delenv("MLA_PORTABLE_TIMES", raising=False)
    return found


def test_the_command_trains_lets_engines_read_and_keeps_what_it_found(
    accuracy: Any, started: list[str], tmp_path: Path
) -> None:
    folder, record, only = tmp_path / "report", tmp_path / "h200.json.gz", "stock-bf16-latent,plugin-bf16-heads,latent-rope"
    words = [str(folder), "--toy", "--only", only, "--parallel", "1"]
    text = ["--text", str(ROOT / "mla_portable/planner"), "--megabytes", "0.1"]
    main = accuracy.command.main
    assert main([*words, *text, "--record", str(record), "--who", "tester"]) == 1, "a toy answers nothing"
    report = (folder / "report.txt").read_text().splitlines()
    names = ["v32-stock-bf16-latent", "v32-stock-bf16-latent-small", "v32-plugin-bf16-heads", "v32-plugin-bf16-latent-rope"]
    assert started == names and report[-1].endswith("; no time for: none")
    said = {(line[:4].strip(), line[5:].split()[0]) for line in report[1:-1]}
    assert said >= {("FAIL", names[0]), ("", names[1]), ("ok", names[2]), ("ok", names[3])}, report
    assert "the model answers 0 of 4 at 128, at least 3 wanted" in report[1] and "seen at" in report[-2]
    run = read_run(record)
    assert {each.suite for each in run.comparisons} == {"accuracy"} and run.versions["vllm"] == "9.9"
    assert len(run.engine_accuracy) == 4 * 3 and all(text.engine == "vllm 9.9" for text in run.engine_accuracy)
    tables = "\n\n".join(accuracy_tables(run))
    assert "| plugin, BF16, prompts may go over keys of each head |" in tables and "0/2" in tables
    assert "attention rotates halves in place of neighbours" in tables.split("Planted faults")[1]

    # a second call trains nothing, and starts what is not there yet
    (folder / f"{names[2]}.json").unlink()
    checkpoint = (folder / "checkpoints/v32/config.json").stat().st_mtime_ns
    started.clear()
    assert main([*words, *text]) == 1 and started == [names[2]]
    assert (folder / "checkpoints/v32/config.json").stat().st_mtime_ns == checkpoint
    assert (folder / "report.txt").read_text().splitlines() == report
    started.clear()
    assert main([*words[:2], "--only", "fp8-heads", "--budget", "0", "--stage", "evaluate"]) == 1 and not started
    assert "no time for: v32-plugin-fp8-heads" in (folder / "report.txt").read_text()
    with pytest.raises(SystemExit, match="run --stage train first"):
        main([*words[:2], "--model", "glm5", "--stage", "evaluate"])
    with pytest.raises(SystemExit):
        main([*words[:2], "--model", "glm6"])
