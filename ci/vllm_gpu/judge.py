# SPDX-License-Identifier: Apache-2.0
"""From what engines left to a line for each comparison: log-probabilities, layers in shadow mode, refusals, times.

Greedy texts can be compared up to the first token that differs, because from there on they have different pasts. That token
may differ where both runs hold both candidates for about equally likely. At a token, two runs differ by the root mean square
over the candidates that both list among their 20 likeliest; of two tokens that have nothing to do with each other, 88 % share
none. Prompts shorter than top-k attend to everything, so only rounding separates two runs. Longer ones also differ by
selections that are near-ties, in two runs of one engine too.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any, Final

import jobs
import kernel_kinds
import mixed_load
import selections
from checkpoint import LAYERS

TOLERANCE: Final = 0.1
"""Log-probabilities of two correct implementations differ by no more where nothing is selected away."""
LONG_LIMIT: Final = 0.5
"""Of long prompts: 1.5 times the largest difference at 12,909 tokens of 46 correct runs (docs/dev/vllm-testing.md)."""
SHADOW_LIMIT: Final = 1e-2

STEP_LIMIT: Final = 1.03
"""Of a decode step, in units of stock's."""
PROMPT_LIMIT: Final = 1.02
"""Of prompts, in units of stock's."""
UNKNOWN_LIMIT: Final = 0.02
"""Of a layer's GPU time: what kernels may take that `kernel_kinds` does not know."""

_NO_STOCK: Final = ("No valid attention backend", "is not valid for this configuration", "requires DeepGEMM")
"""What vLLM says where none of its own backends, or not its indexer, can serve a model."""

_SHORT: Final = {"longest": jobs.TOPK}
_LONG: Final = {"shortest": jobs.TOPK + 1}

Run = Sequence[dict[str, Any]]
"""Of each prompt its length, tokens, and log-probabilities by token at each."""


@dataclass(frozen=True)
class Agreement:
    """Two runs over some prompts: the largest difference at a token, tokens that were compared, texts that part.

    parted: [(prompt length, token, how far the two candidates are apart, inf where a run does not list both)].
    lost: where the difference is infinite: the prompt's length, the token, and what both runs list there.
    """

    difference: float
    compared: int
    parted: tuple[tuple[int, int, float], ...]
    lost: str = ""

    def within(self, limit: float) -> bool:
        """Nothing differs by more than `limit`, and texts part only where candidates are no further apart than twice that."""
        return self.compared > 0 and self.difference <= limit and all(gap <= 2 * limit for _, _, gap in self.parted)

    def __str__(self) -> str:
        ties = f", {len(self.parted)} texts part" if self.parted else ""
        return f"{self.difference:.3f}{self.lost} over {self.compared} tokens{ties}"


def _largest(found: Iterable[float]) -> float:
    """inf where there is none, or one is no number."""
    return max((each if math.isfinite(each) else math.inf for each in found), default=math.inf)


def _apart(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Root mean square over the candidates that both list; inf where there is none, or one is no number."""
    shared = [one[each] - other[each] for each in one.keys() & other.keys()]
    found = math.sqrt(math.fsum(each * each for each in shared) / len(shared)) if shared else math.inf
    return found if math.isfinite(found) else math.inf


Both = tuple[Mapping[str, float], Mapping[str, float]]
"""Log-probabilities by token, in two runs."""


def _same_past(one: Run, other: Run, shortest: int, longest: int) -> Iterator[tuple[int, int, Both, tuple[int, int]]]:
    """Prompt length, place, log-probabilities and tokens of both runs, of each text up to where it parts."""
    for a, b in zip(one, other, strict=True):
        if not shortest <= a["length"] + len(a["tokens"]) <= longest:
            continue
        for at, (token, its) in enumerate(zip(a["tokens"], b["tokens"], strict=True)):
            yield a["length"], at, (a["logprobs"][at], b["logprobs"][at]), (token, its)
            if token != its:
                break


def agree(one: Run, other: Run, *, shortest: int = 0, longest: int = 2**31) -> Agreement:
    """Compare the prompts whose whole text, prompt and tokens, has `shortest` to `longest` tokens.

    Raises: ValueError when the runs are not over the same prompts.
    """
    lengths = [[(p["length"], len(p["tokens"])) for p in run] for run in (one, other)]
    if lengths[0] != lengths[1]:
        raise ValueError(f"the runs are over other prompts: {lengths[0]} and {lengths[1]}")
    largest, compared, lost = 0.0, 0, ""
    parted: list[tuple[int, int, float]] = []
    for length, at, both, (token, its) in _same_past(one, other, shortest, longest):
        compared += 1
        apart = _apart(*both)
        if math.isinf(apart) and not lost:
            lost = f" (prompt of {length}, token {at}: {both[0]} and {both[1]})"
        largest = max(largest, apart)
        if token != its:
            gaps = [abs(run.get(str(token), math.inf) - run.get(str(its), math.inf)) for run in both]
            parted.append((length, at, _largest(gaps)))
    return Agreement(largest, compared, tuple(parted), lost)


@dataclass(frozen=True)
class Compared:
    """Two runs over prompts of up to top-k tokens, and over longer ones."""

    short: Agreement
    long: Agreement

    @property
    def is_close(self) -> bool:
        return self.short.within(TOLERANCE) and self.long.difference <= LONG_LIMIT

    def __str__(self) -> str:
        return f"short {self.short}; long {self.long}"


def compare(one: Run, other: Run) -> Compared:
    return Compared(agree(one, other, **_SHORT), agree(one, other, **_LONG))


def read_shadow(file: Path, methods: Sequence[str] = ("forward_mqa",)) -> tuple[bool, str]:
    """Of shadow mode's file: every record is within SHADOW_LIMIT, and there are some of each method; the worst in words."""
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    several = {method: [r["relative"] for r in records if r["method"] == method] for method in methods}
    worst = {method: _largest(found) for method, found in several.items()}
    passed = all(each < SHADOW_LIMIT for each in (*worst.values(), _largest(r["relative"] for r in records)))
    text = ", ".join(f"{method} {worst[method]:.1e} in {len(several[method])} records" for method in methods)
    return passed, f"{text} of {len({r['layer'] for r in records})} layers"


@dataclass(frozen=True)
class Done:
    """A job that ran: its result ({} where it left none), what went wrong ("" where nothing did), which kernels served.

    indexer: whose indexer selected, as the plugin's log says it.
    """

    job: jobs.Job
    result: dict[str, Any]
    error: str = ""
    served: str = ""
    indexer: str = ""

    @property
    def runs(self) -> list[Run]:
        """What was generated; empty where the process failed."""
        return self.result.get("runs", [])


Ran = Mapping[str, Done]


@dataclass(frozen=True)
class Line:
    """What was compared, what was found, and whether that is right; None where it is reported for information."""

    name: str
    found: str
    passed: bool | None = None

    def __str__(self) -> str:
        return f"{ {True: 'ok  ', False: 'FAIL', None: '    '}[self.passed] } {self.name:26} {self.found}"


def _runs(ran: Ran, name: str) -> list[Run]:
    return ran[name].runs if name in ran else []


def agreement(ran: Ran, planned: Sequence[jobs.Job], out: Path) -> Iterator[Line]:
    """What is compared with stock or with itself, and what must be refused, as far as it was planned."""
    names = {job.name for job in planned}
    cells = [jobs.cell(kv, heads) for heads, kv in product(jobs.HEADS, jobs.KV_DTYPES)]
    for cell in cells:
        yield from (line for line in _cell(ran, out, cell) if line.name in names)
    if "untouched-fp8-h64-eager" in names:
        done = ran.get("untouched-fp8-h64-eager")
        chosen = done.result.get("impl") if done is not None else None
        yield Line("untouched-fp8-h64-eager", f"vLLM's own choice is {chosen}", chosen == ["FlashMLASparseImpl"])
    for name in sorted(names):
        if name.startswith("default-plugin-"):
            yield _by_default(ran, out, name)
    if any(name.startswith("requests-") for name in names):
        yield _many(ran, "requests-plugin", "requests-plugin-one", "requests-plugin-small")
    for name, done in ran.items():
        if done.job.task == "refuse":
            yield _refusal(name, done)


def _refusal(name: str, done: Done) -> Line:
    """An engine that must not start said what it should."""
    messages, says = done.result.get("refused", []), done.job.options["says"]
    refused = any(says in text for text in messages)
    return Line(name, says if refused else f"expected {says!r}: {messages or 'it started'}", refused)


def _by_default(ran: Ran, out: Path, name: str) -> Line:
    """Against stock by default. Prompts must have gone over keys of each head, and come from the cache the second time."""
    other = name.replace("plugin", "stock")
    line = _as_without(name, _runs(ran, other), _runs(ran, name))
    if not _runs(ran, other) or not _runs(ran, name):
        return line
    done, stock = ran[name], ran[other]
    cached = sum(prompt["cached"] or 0 for prompt in done.runs[-1])
    ours, its = (each.result["per_head"] for each in (done, stock))
    passed = bool(line.passed) and cached > 0 and ours > 0
    found = f"{line.found}; {ours} tokens over keys of each head (stock {its}), {cached} cached"
    if done.job.options["shadow"]:
        same, shadow = read_shadow(out / f"{name}.shadow", ("forward_mqa", "forward_mha"))
        passed, found = passed and same, f"{found}; shadow {shadow}"
    return Line(name, found, passed)


def _stock(ran: Ran, cell: str) -> dict[str, list[Run]]:
    return {mode: _runs(ran, f"stock-{cell}-{mode}") for mode in ("eager", "graphs")}


def _against_itself(runs: Sequence[Run]) -> str:
    """The largest differences between two runs of one engine, in words; inf where there is one run alone."""
    pairs = list(combinations(runs, 2))
    own = [max((agree(*pair, **side).difference for pair in pairs), default=math.inf) for side in (_SHORT, _LONG)]
    return f"against itself: short {own[0]:.3f}, long {own[1]:.3f}"


def _cell(ran: Ran, out: Path, cell: str) -> Iterator[Line]:
    """One head count and cache format: stock against itself, then all others against stock."""
    stock = _stock(ran, cell)
    text = _against_itself([*stock["eager"], *stock["graphs"]])
    yield Line(f"stock-{cell}-eager", text if stock["eager"] else "did not finish", None if stock["eager"] else False)
    for who, mode in product(("plugin", "triton", "override", *jobs.REHEARSALS), jobs.MODES):
        theirs = stock["eager" if mode == "eager" else "graphs"]
        yield _against(ran, out, f"{who}-{cell}-{mode}", theirs)


def _against(ran: Ran, out: Path, name: str, stock: list[Run]) -> Line:
    """Where stock was not asked to run, because it does not run here, watched selections are judged by themselves."""
    ours = _runs(ran, name)
    theirs = f"stock-{name.partition('-')[2]}"
    alone = not stock and theirs not in ran
    if not ours or (not stock and not (alone and ran[name].job.options.get("watch"))):
        return Line(name, f"not compared: {'stock' if ours else name} did not finish", False)
    done, passed, found = ran[name], True, "without stock"
    if stock:
        compared = compare(ours[0], stock[0])
        passed, found = compared.is_close, str(compared)
    if done.job.options.get("shadow"):
        same, shadow = read_shadow(out / f"{name}.shadow")
        passed, found = passed and same, f"{found}; shadow {shadow}"
    if done.job.options.get("watch"):
        rows, others = (selections.read(out / f"{each}.selections") for each in (name, theirs))
        same, watched = selections.judge(rows, None if alone else others)
        passed, found = passed and same and not done.result["watch"], f"{found}; {done.result['watch'] or watched}"
    if done.job.rehearsal:
        found = f"{found}; indexer {done.indexer or 'not named'}"
    wrongly = served_wrongly(done)
    return Line(name, f"{found}; {wrongly}", False) if wrongly else Line(name, found, passed)


def served_wrongly(done: Done) -> str:
    """Which part of the engine was not what the job asks for; "" where all was."""
    if done.job.who == "indexer":
        impl = done.result.get("impl")
        return "" if impl == ["FlashMLASparseImpl"] else f"attention is {impl}"
    if not done.served or (done.job.who == "triton" and "nvidia." in done.served):
        return f"served by {done.served or 'others'}"
    arch = done.job.rehearsal.get("arch")
    if arch is None:
        return ""
    state = done.result["rehearsed"]
    foreign = [name for name in state["foreign"] if name in done.served]
    if set(state["archs"].values()) != {arch} or not state["kernels"] or foreign:
        return (
            f"{arch} not rehearsed: {state['archs']}, {state['kernels']} kernels; of other architectures: {foreign or 'none'}"
        )
    return ""


def _many(ran: Ran, name: str, one: str, small: str) -> Line:
    """Many requests in a cache that is too small for them against the same one by one: all finish, some preempted."""
    alone, several = _runs(ran, one), _runs(ran, small)
    if not alone or not several:
        return Line(name, "did not finish", False)
    found, result = agree(several[0], alone[0]), ran[small].result
    lost = sum(len(p["tokens"]) != wanted for p, wanted in zip(several[0], result["wanted"], strict=True))
    text = f"{len(several[0])} requests, {lost} cut short, {result['preempted']} preemptions; one by one: {found}"
    return Line(name, text, lost == 0 and result["preempted"] > 0 and found.within(TOLERANCE))


def tensor_parallel(ran: Ran) -> Iterator[Line]:
    """Two GPUs against one: sums are split, and so rounded, differently."""
    one = _runs(ran, "tp1-plugin")
    for name in ("tp2-plugin", "pp2-plugin", "dp2-plugin", "dbo2-plugin"):
        if name in ran:
            line = _as_without(name, one, _runs(ran, name))
            yield line if ran[name].served or name != "tp2-plugin" else Line(name, f"{line.found}; served by others", False)


def _as_without(name: str, without: list[Run], runs: list[Run]) -> Line:
    """Every run of a feature against the first without it."""
    if not without or not runs:
        return Line(name, "did not finish", False)
    compared = [compare(run, without[0]) for run in runs]
    return Line(name, "; then ".join(map(str, compared)), all(each.is_close for each in compared))


def features(ran: Ran) -> Iterator[Line]:
    """Each feature against the same engine without it, whose own runs say what differs anyway."""
    without = _runs(ran, "feature-none")
    own = max((agree(*pair, **_LONG).difference for pair in combinations(without, 2)), default=0.0)
    yield Line("feature-none", f"against itself: long {own:.3f}", None if without else False)
    for name, done in ran.items():
        if done.job.task == "generate" and name != "feature-none":
            line = _as_without(name, without, done.runs)
            if line.passed is not None and done.runs and done.job.arguments.get("enable_prefix_caching"):
                cached, outside = sum(p["cached"] or 0 for p in done.runs[-1]), done.result["outside"]
                right = outside > 0 if "kv_transfer_config" in done.job.arguments else cached > 0
                line = Line(name, f"{line.found}; {cached} tokens cached, {outside} loaded", line.passed and right)
            yield line
    if "feature-all-one" in ran:
        yield _many(ran, "feature-all", "feature-all-one", "feature-all-small")


def other_models(ran: Ran, planned: Sequence[jobs.Job]) -> Iterator[Line]:
    """Each engine against stock's eager one; where stock has no such cache, against that of Triton's kernels alone.

    Where vLLM has no backend of its own for the model, because a package is missing, that is said and does not count. An engine
    that differs from itself fails, and nothing is judged by it. Where prompts may go over keys of each head, the plugin's must.
    """
    models = {**jobs.OTHER_MODELS, **jobs.FOUR_BITS}
    for job in planned:
        if job.task == "refuse":
            if job.name in ran:
                yield _refusal(job.name, ran[job.name])
            continue
        name, kv = job.name.split("-")[0], job.name.split("-")[-2]
        _, stock = models[name]
        known = [f"{name}-{who}-{kv}-eager" for who in (stock, "triton")]
        against = next((each for each in known if _runs(ran, each)), "")
        runs = _runs(ran, job.name)
        if not runs:
            yield _unfinished(job.name, ran.get(job.name), is_stock=job.who == stock)
        elif job.name == against:
            yield _reference(job.name, runs)
        elif not against:
            yield Line(job.name, f"nothing to compare it with: none of {', '.join(known)} finished", False)
        else:
            compared = compare(_runs(ran, against)[0], runs[0])
            passed, found = (
                compared.is_close and (job.who == stock or bool(ran[job.name].served)),
                f"against {against}: {compared}",
            )
            if job.options.get("by_default") and job.who == "plugin":
                per_head = ran[job.name].result["per_head"]
                passed, found = passed and per_head > 0, f"{found}; {per_head} tokens over keys of each head"
            yield Line(job.name, found, passed if _agrees(_runs(ran, against)) else None)


@dataclass(frozen=True)
class Distance:
    """Of a run from the truth, over the candidates that both list: mean and largest difference, tokens compared and equal.

    torn: the gap in the truth between its token and the run's, the largest where texts part.
    """

    mean: float
    largest: float
    compared: int
    equal: int
    torn: float

    def within(self, mean: float, largest: float) -> bool:
        """Texts may part where the truth holds both tokens for about equally likely."""
        return self.compared > 0 and self.mean <= mean and self.largest <= largest and self.torn <= 2 * largest

    def __str__(self) -> str:
        return f"mean {self.mean:.4f}, max {self.largest:.3f}, {self.equal} of {self.compared} tokens equal"


def distance(run: Run, truth: Run, *, shortest: int = 0, longest: int = 2**31) -> Distance:
    """How far a run is from the truth over the prompts whose whole text has `shortest` to `longest` tokens."""
    found, compared, equal, torn = list[float](), 0, 0, 0.0
    for _, _, (its, true), (token, right) in _same_past(run, truth, shortest, longest):
        compared, equal = compared + 1, equal + (token == right)
        found += [abs(its[each] - true[each]) for each in its.keys() & true.keys()] or [math.inf]
        if token != right:
            torn = max(torn, _largest([true[str(right)] - true.get(str(token), -math.inf)]))
    largest = _largest(found)
    mean = math.fsum(found) / len(found) if found and math.isfinite(largest) else math.inf
    return Distance(mean, largest, compared, equal, torn)


FROM_TRUTH: Final = {"auto": (0.035, 0.2), "fp8_ds_mla": (0.06, 0.4)}
"""By the cache, mean and largest distance from float32 where nothing is selected away (docs/dev/vllm-testing.md). The truth of
FP8 has the same latents in e4m3, but engines round what comes before them to BF16, so that other codes are chosen."""
BESIDE_STOCK: Final = 1.3
"""Of the mean distance of long prompts, in units of stock's: a selection of random weights swaps heavy keys as often as light
ones, so that no limit of its own tells rounding from a mistake."""


def transformers(ran: Ran, planned: Sequence[jobs.Job]) -> Iterator[Line]:
    """Engines, and our attention function, against transformers in float32."""
    for job in planned:
        name, _, what = job.name.split("-")
        done = ran.get(job.name)
        if what in ("exact", "pow2", "amax"):
            found = f"the truth, by {done.result['by']}" if done is not None and done.runs else "did not finish"
            yield Line(job.name, found, None if done is not None and done.runs else False)
            continue
        truths = [run for fp8 in jobs.TRUTHS[job.kv] for run in _runs(ran, f"{name}-truth-{fp8 or 'exact'}")]
        if done is not None and "needs transformers" in done.error:
            yield Line(job.name, f"not served here: {done.error}", None)
        elif done is None or not done.runs or len(truths) < len(jobs.TRUTHS[job.kv]):
            yield Line(job.name, "did not finish, or a truth did not", False)
        else:
            yield _from_truth(ran, job, done.runs[0], truths)


def _from_truth(ran: Ran, job: jobs.Job, run: Run, truths: Sequence[Run]) -> Line:
    """Against the nearer truth; long prompts beside stock's distance."""
    short, truth = min(((distance(run, each, **_SHORT), each) for each in truths), key=lambda pair: pair[0].mean)
    long = distance(run, truth, **_LONG)
    mean, largest = FROM_TRUTH[job.kv]
    passed, found = short.within(mean, largest), f"short {short}; long {long}"
    stock = _runs(ran, job.name.replace("-plugin-", "-stock-").replace("-function-", "-stock-"))
    if job.who == "plugin" and stock:
        its = distance(stock[0], truth, **_LONG)
        passed = passed and long.mean <= max(BESIDE_STOCK * its.mean, mean)
        found += f" (stock: {its})"
    if job.task == "generate" and job.who == "plugin":
        passed = passed and bool(ran[job.name].served)
    return Line(job.name, found, passed)


def sinks(ran: Ran, planned: Sequence[jobs.Job], out: Path) -> Iterator[Line]:
    """Engines of hy_v4 against stock's whose decodes wait for their selection, and how many of all tokens are far off.

    A token here and there that is far off, with those around it close, is no rounding. Stock as it is released informs: where
    it differs from itself or from stock that waits, its decodes attended to another selection.
    """
    for job in planned:
        _, who, kv, _ = job.name.split("-")
        against = f"sinks-stock-{kv}-eager"
        runs, stock = _runs(ran, job.name), _runs(ran, against)
        if not runs:
            yield _unfinished(job.name, ran.get(job.name), is_stock=job.who == "stock")
        elif who == "shadow":
            passed, found = read_shadow(out / f"{job.name}.shadow")
            yield Line(job.name, found, passed and bool(ran[job.name].served))
        elif job.name == against:
            yield _reference(job.name, runs)
        elif not stock:
            yield Line(job.name, f"nothing to compare it with: {against} did not finish", False)
        else:
            far = [_far_off(one, two) for one, two in product(stock, runs)]
            own = f"; {_against_itself(runs)}" if len(runs) > 1 else ""
            compared = compare(stock[0], runs[0])
            text = f"against {against}: {compared}; up to {max(far)} tokens of a run off by more than {TOLERANCE}{own}"
            close = all(compare(stock[0], run).is_close for run in runs)
            ours = job.who == "stock" or bool(ran[job.name].served)
            yield Line(job.name, text, None if who == "released" or not _agrees(stock) else close and ours)


def _far_off(one: Run, other: Run) -> int:
    """Tokens by which two runs differ by more than TOLERANCE, up to the first of each text that differs."""
    found = 0
    for a, b in zip(one, other, strict=True):
        for at, (token, its) in enumerate(zip(a["tokens"], b["tokens"], strict=True)):
            found += _apart(a["logprobs"][at], b["logprobs"][at]) > TOLERANCE
            if token != its:
                break
    return found


def _agrees(runs: Sequence[Run]) -> bool:
    """An engine's runs are as close as those of two engines have to be."""
    return all(compare(*pair).is_close for pair in combinations(runs, 2))


def _reference(name: str, runs: Sequence[Run]) -> Line:
    """Of the engine with which others are compared; it fails where they cannot be judged by it."""
    own = f"; {_against_itself(runs)}" if len(runs) > 1 else ""
    if _agrees(runs):
        return Line(name, f"what the others are compared with{own}", None)
    return Line(name, f"differs from itself, so that nothing is judged by it{own}", False)


def _unfinished(name: str, done: Done | None, *, is_stock: bool) -> Line:
    """A job without a result: that fails, unless it is stock's and vLLM says that it has nothing for the model here."""
    if done is not None and is_stock and any(text in done.error for text in _NO_STOCK):
        return Line(name, f"stock does not serve it here: {done.error}", None)
    return Line(name, "did not finish", False)


def _beside_stock(ran: Ran) -> Iterator[tuple[str, Done, Done]]:
    """Each of the plugin's jobs that finished, with stock's."""
    for name, done in ran.items():
        stock = ran.get(name.replace("-plugin", "-stock"))
        if done.job.who == "plugin" and stock is not None:
            yield name, done, stock


def load(ran: Ran) -> Iterator[Line]:
    """The plugin beside stock by default: steps in graphs are judged where a GPU has 64 heads or more, the rest informs."""
    for name, done, stock in _beside_stock(ran):
        if not done.result or not stock.result:
            yield Line(name, "did not finish", False)
            continue
        for prompts, its in stock.result["first"].items():
            yield Line(name, f"first token of {prompts}: {done.result['first'][prompts]} ms, stock {its} ms")
        yield Line(name, f"{done.result['tokens_s']} tokens a second, stock {stock.result['tokens_s']}")
        ours, its = done.result["step_us"], stock.result["step_us"]
        text = f"a decode of {done.job.options['decodes']['batch']}: {ours:.0f} us, {ours / its:.3f} of stock's step"
        counts = done.job.heads >= 64 and done.job.mode == "graphs"
        yield Line(name, text, ours <= STEP_LIMIT * its if counts else None)


def prompts(ran: Ran) -> Iterator[Line]:
    """A layer's GPU time in steps of prompts, beside stock by default: not above it."""
    for name, done, stock in _beside_stock(ran):
        if not done.result or not stock.result:
            yield Line(name, "did not finish", False)
            continue
        for step, kernels in done.result["first"].items():
            ours, its = (sum(each.values()) / LAYERS for each in (kernels, stock.result["first"][step]))
            largest = sorted(kernels.items(), key=lambda item: -item[1])[:3]
            most = ", ".join(f"{kernel[:60]} {us / LAYERS:.0f}" for kernel, us in largest)
            text = f"{step}: {ours:.0f} us a layer, stock {its:.0f}, {ours / its:.3f} of it; most of it {most}"
            yield Line(name, text, ours <= PROMPT_LIMIT * its)


def rank(ran: Ran) -> Iterator[Line]:
    """First tokens, decode steps and a layer's kernels of one rank's share, beside stock by default where it ran.

    First tokens are judged, and that kernels of no known kind take little; the rest informs.
    """
    for name, done in ran.items():
        stock = ran.get(name.replace("-plugin", "-stock")) if done.job.who == "plugin" else None
        alone = stock is not None and _unfinished(name, stock, is_stock=True).passed is None
        if not done.result:
            yield _unfinished(name, done, is_stock=done.job.who != "plugin")
            continue
        if stock is not None and not stock.result and not alone:
            yield Line(name, "did not finish", False)
            continue
        theirs = stock.result if stock is not None else {}
        for step, ours in done.result["first"].items():
            its = theirs.get("first", {}).get(step)
            text = f"first token of {step}: {ours:.1f} ms{_of_stock(ours, its, 1)}"
            yield Line(name, text, None if its is None else ours <= PROMPT_LIMIT * its)
        for batch, ours in done.result["step_us"].items():
            its = theirs.get("step_us", {}).get(batch)
            yield Line(name, f"a decode of {batch}: {ours / 1e3:.2f} ms{_of_stock(ours, its, 1e3)}")
        for step, found in done.result["kernels"].items():
            yield from _kernels(name, step, found, theirs.get("kernels", {}).get(step, {}).get("kinds", {}))


def serve(ran: Ran) -> Iterator[Line]:
    """Mixed loads beside stock: tokens a second, first tokens and what is between tokens. They inform.

    Of several turns of a load the medians. The kernels that were compiled while requests waited are named, in the first load
    too. The plugin's engine fails if one of ours is among them; others inform.
    """
    for name, done, stock in _beside_stock(ran):
        if not done.result or not stock.result:
            yield Line(name, "did not finish", False)
            continue
        both = [mixed_load.by_rate(each.result["loads"]) for each in (done, stock)]
        for rate, ours in both[0].items():
            theirs = both[1][rate]
            what = "all at once" if rate is None else f"{rate:g} requests/s"
            ratios = ", ".join(f"{key} {mine:.1f} / {theirs[key]:.1f} = {mine / theirs[key]:.3f}" for key, mine in ours.items())
            yield Line(name, f"{what}, {done.result['layers']} layers: {ratios}")
        for who, each in (("plugin", done), ("stock", stock)):
            compiled = sum((Counter(load["compiled"]) for load in each.result["loads"]), Counter[str]())
            names = ", ".join(f"{kernel} {count}" for kernel, count in sorted(compiled.items()))
            yield Line(name, f"{who}: peak {each.result['peak_mib']} MiB; compiled while serving: {names or 'nothing'}")
        ours = sorted({kernel for load in done.result["loads"] for kernel in load["ours"]})
        yield Line(name, f"of mla_portable, compiled while serving: {', '.join(ours) or 'nothing'}", not ours)


def _of_stock(ours: float, its: float | None, unit: float) -> str:
    return "" if its is None else f", stock {its / unit:.2f}, {ours / its:.3f} of it"


def _kernels(name: str, step: str, found: Mapping[str, Any], theirs: Mapping[str, float]) -> Iterator[Line]:
    """A line for each kind of kernel that this engine or stock's has, and one for those of no kind."""
    kinds: Mapping[str, float] = found["kinds"]
    whole = sum(kinds.values())
    yield Line(name, f"{step}, us a layer: {whole:.0f}{_of_stock(whole, sum(theirs.values()) or None, 1)}")
    for kind in kernel_kinds.KINDS[:-1]:
        if kind in kinds or kind in theirs:
            beside = f", stock {theirs.get(kind, 0.0):.0f}" if theirs else ""
            yield Line(name, f"{step}, us a layer: {kinds.get(kind, 0.0):.0f}{beside} {kind}")
    unknown = kinds.get(kernel_kinds.UNKNOWN, 0.0)
    most = sorted(found["unknown"].items(), key=lambda item: -item[1])[:3]
    names = "".join(f"; {kernel[:80]} {us:.1f}" for kernel, us in most)
    yield Line(name, f"{step}, us a layer: {unknown:.1f} {kernel_kinds.UNKNOWN}{names}", unknown <= UNKNOWN_LIMIT * whole)


def context_parallel(ran: Ran, planned: Sequence[jobs.Job]) -> Iterator[Line]:
    """GPUs that share sequences against one that holds everything."""
    for job in planned:
        if job.task != "generate" or job.gpus == 1:
            continue
        alone = f"dcp1-plugin-{jobs.cell(job.kv, job.heads)}"
        whole, shared = _runs(ran, alone), _runs(ran, job.name)
        if not whole or not shared:
            yield Line(job.name, "did not finish", False)
            continue
        compared = compare(whole[0], shared[0])
        pools = [ran[name].result["pool"] for name in (job.name, alone)]
        text = f"against one GPU: {compared}; {pools[0]} tokens in the cache ({pools[1]})"
        yield Line(job.name, text, compared.is_close and bool(ran[job.name].served))
    for small in (job.name for job in planned if job.name.startswith("requests-") and job.name.endswith("-small")):
        yield _many(ran, small, small.replace("-small", "-one"), small)
