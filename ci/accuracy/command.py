# SPDX-License-Identifier: Apache-2.0
"""A trained model as a judge: trains it, lets engines read and answer, says which of them differ from stock by too much.

    ci/gpu_accuracy [FOLDER] [--model v32,glm5] [--stage train,evaluate] [--only TEXT] [--parallel N] [--budget SECONDS]
                    [--train-seconds SECONDS] [--text DIR ...] [--megabytes N] [--seed N] [--toy]
                    [--record FILE [--who NAME] [--commit COMMIT]]

Everything is kept in FOLDER (default: accuracy-report): a checkpoint that is there is not trained again, and an engine whose
result is there is not started again, so that a call with a small budget goes on where the last one stopped. `report.txt` is
written by each call, of all results that are there. Exit status 1 where a line says FAIL, or a job had no time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch

sys.path.append(str(Path(__file__).parents[1] / "vllm_gpu"))

import forms
import judge
import kit
import questions
import training
from asked_engines import PROMPTS, Asked, engines
from corpus import default_roots, documents, make_corpus
from network import Network
from own_answers import answers, scale_slopes
from own_selections import SELECTIONS, write_own_selections
from stored import write_checkpoint
from verdict import Verdict

from mla_portable.choose import get_registry
from mla_portable.choose.facts import resolve_device
from mla_portable.cli.recording import recorder

CHECKPOINTS: Final = "checkpoints"
STAGES: Final = ("train", "evaluate")
_TOY: Final = questions.PromptSet(((16, 4),), ((128, 4), (256, 2)), (0.2, 0.7))


def trained(form: forms.Form, folder: Path, options: argparse.Namespace) -> None:
    """Train one model, write its checkpoint and the prompts that it is judged by, and say what it answers by itself."""
    begin = time.monotonic()
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() and not options.toy else "cpu")
    texts = list(documents(options.text or default_roots(), int(options.megabytes * 1e6), seed=options.seed))
    corpus = make_corpus(texts, form.vocab, questions.NEEDED)
    size = sum(map(len, texts))
    counts = f"{len(texts)} documents, {size / 1e6:.1f} M characters, {len(corpus.train) / 1e6:.2f} M tokens"
    print(f"{form.name}: {counts}, {corpus.digest[:16]}, {time.monotonic() - begin:.0f} s", flush=True)
    network = Network(form).to(device)
    parts = [sum(p.numel() for p in part) for part in network.parts()]
    print(f"{form.name}: {parts[0] / 1e6:.1f} M parameters, and {parts[1] / 1e6:.1f} M of indexers", flush=True)
    stages = training.TOY if options.toy else training.STAGES
    log = training.train(network, corpus, stages, seed=options.seed, seconds=options.train_seconds)
    wanted = _TOY if options.toy else questions.FULL
    prompts = questions.prompts(corpus, wanted, seed=options.seed + 1)
    # what is judged is the checkpoint: weights rounded to bfloat16, products in float32
    network.load_state_dict({name: value.to(torch.bfloat16).float() for name, value in network.state_dict().items()})
    network.requires_grad_(False)
    for prompt in prompts:
        if "answer" not in prompt:
            prompt["slopes"] = scale_slopes(network, prompt["tokens"])
    asked = [prompt for prompt in prompts if prompt["length"] == wanted.asked[0][0]]
    own: dict[str, Any] = {}
    for mode in ("dense", "chosen"):
        right, count, perplexity = answers(network, asked, mode)
        own[mode] = {"right": right, "asked": count, "perplexity": round(perplexity, 4)}
        print(f"{form.name}: in plain torch, {mode}: answers {right} of {count}, perplexity {perplexity:.4f}", flush=True)
    made = {"seed": options.seed, "text": corpus.digest, "own": own, "log": log, "seconds": round(time.monotonic() - begin, 1)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PROMPTS).write_text(json.dumps({"made": made, "prompts": prompts}))
    names = write_checkpoint(folder, form.config(), network.state_dict())
    text = f"a prompt of {asked[0]['length']} tokens of text {corpus.digest[:16]}, seed {options.seed}"
    write_own_selections(folder / SELECTIONS, network, asked[0]["tokens"], made=text)
    total = sum((folder / name).stat().st_size for name in (*names, PROMPTS, SELECTIONS))
    print(f"{folder}: {len(names) + 2} files, {total / 2**20:.1f} MiB, {made['seconds']} s", flush=True)


def evaluate(wanted: Sequence[Asked], heads: int, out: Path, *, parallel: int, end: float) -> dict[Asked, judge.Done]:
    """Every engine whose result is there, or can be started before `end` (time.monotonic)."""

    def one(asked: Asked) -> judge.Done | None:
        job = asked.job(heads)
        if (out / f"{job.name}.json").exists():
            return kit.left_by(job, out, "exit 0")
        return kit.run_job(job, out, out / CHECKPOINTS, end)

    with ThreadPoolExecutor(max(1, parallel)) as pool:
        several = zip(wanted, pool.map(one, wanted), strict=True)
        return {asked: done for asked, done in several if done is not None}


def keep(path: Path, verdicts: Iterable[tuple[Verdict, list[judge.Line]]], who: str | None, commit: str | None) -> None:
    """Add lines and figures to the file of a run."""
    device, version = resolve_device(get_registry().default_device()), metadata.version("vllm")
    file = recorder(path, get_registry(), device, who=who, commit=commit, versions={"vllm": version})
    engine = f"vllm {version}"
    for verdict, lines in verdicts:
        file.add(compared=kit.comparisons(engine, "accuracy", lines), engine_accuracy=verdict.records(engine))


def main(words: Sequence[str] | None = None) -> int:
    """Raises: SystemExit when --only names nothing, or a checkpoint to evaluate is missing."""
    parser = argparse.ArgumentParser(
        prog="ci/gpu_accuracy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path("accuracy-report"), help="for all that is kept")
    parser.add_argument("--model", default="v32", help=f"of {', '.join(forms.FORMS)}, comma-separated")
    parser.add_argument("--stage", default=",".join(STAGES), help="train, evaluate, or both")
    parser.add_argument("--only", default="", help="engines whose name contains one of these, comma-separated")
    parser.add_argument("--parallel", type=int, default=6, help="engines at a time on the GPU")
    parser.add_argument("--budget", type=int, default=560, help="seconds for all of it; training is not cut short by it")
    parser.add_argument("--train-seconds", type=float, default=330, help="for the steps of training")
    parser.add_argument("--text", type=Path, action="append", metavar="DIR", help="text to train on; default: Python's folders")
    parser.add_argument("--megabytes", type=float, default=48, help="of text")
    parser.add_argument("--seed", type=int, default=20262)
    parser.add_argument("--toy", action="store_true", help="a tiny model on a CPU, to check this program")
    parser.add_argument("--record", type=Path, metavar="FILE", help="add the results to a run (docs/dev/evidence.md)")
    parser.add_argument("--who", metavar="NAME", help="who runs this, for --record; default: git's user.name, or the login")
    parser.add_argument("--commit", help="of the code that runs, for --record where git is not there to say it")
    options, begin = parser.parse_args(words), time.monotonic()
    out, end = options.folder.resolve(), begin + options.budget
    models, stages = options.model.split(","), options.stage.split(",")
    for name, several in ((models, forms.FORMS), (stages, STAGES)):
        if unknown := [each for each in name if each not in several]:
            parser.error(f"no {', '.join(unknown)}; there are {', '.join(several)}")
    out.mkdir(parents=True, exist_ok=True)
    chosen = {name: forms.toy(forms.FORMS[name]) if options.toy else forms.FORMS[name] for name in models}
    for name, form in chosen.items():
        if "train" in stages and not (out / CHECKPOINTS / name / "config.json").exists():
            trained(form, out / CHECKPOINTS / name, options)
    if "evaluate" not in stages:
        return 0
    verdicts: list[tuple[Verdict, list[judge.Line]]] = []
    report, left_out = list[str](), list[str]()
    for name, form in chosen.items():
        checkpoint = out / CHECKPOINTS / name
        if not (checkpoint / "config.json").exists():
            raise SystemExit(f"{checkpoint} has no checkpoint: run --stage train first")
        wanted = [asked for asked in engines(name) if any(text in asked.name for text in options.only.split(","))]
        done = evaluate(wanted, form.heads, out, parallel=options.parallel, end=end)
        earlier = [asked for asked in engines(name) if asked not in wanted and (out / f"{asked.name}.json").exists()]
        done |= evaluate(earlier, form.heads, out, parallel=1, end=end)
        stored = json.loads((checkpoint / PROMPTS).read_text())
        verdict = Verdict(done, stored["prompts"])
        lines = list(verdict.lines())
        verdicts.append((verdict, lines))
        left_out += [asked.name for asked in wanted if asked not in done]
        own = ", ".join(f"{mode} {each['right']}/{each['asked']}" for mode, each in stored["made"]["own"].items())
        report += [f"{name}: text {stored['made']['text'][:16]}, in plain torch {own}", *map(str, lines)]
    if not any(verdict.done for verdict, _ in verdicts) and not left_out:
        raise SystemExit(f"--only {options.only}: no engine has that in its name")
    every = [line for _, lines in verdicts for line in lines]
    failed = sum(line.passed is False for line in every)
    report.append(f"{len(every)} lines, {failed} failed; no time for: {', '.join(left_out) or 'none'}")
    text = "\n".join(report)
    (out / "report.txt").write_text(f"{text}\n")
    print(f"\n{text}", flush=True)
    if options.record:
        keep(options.record, verdicts, options.who, options.commit)
    return int(bool(failed or left_out))


if __name__ == "__main__":
    sys.exit(main())
