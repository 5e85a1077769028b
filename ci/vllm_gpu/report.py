# SPDX-License-Identifier: Apache-2.0
"""From what ran to what is shown: a line for each comparison, with what was found and whether it is as it must be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any, Final

import jobs
import judge
from pool import Done

__all__ = ["Line", "agreement", "failures", "speed", "tensor_parallel"]

_LONG: Final = jobs.TOPK + 1
_CHEAPER_BUILD: Final = 10
_STEP_LIMIT: Final = 1.03

Ran = Mapping[str, Done]


@dataclass(frozen=True)
class Line:
    """What was asked, what was found, and whether that is right; None where it is reported for information."""

    name: str
    found: str
    passed: bool | None = None

    def __str__(self) -> str:
        return f"{ {True: 'ok  ', False: 'FAIL', None: '    '}[self.passed] } {self.name:26} {self.found}"


def _runs(ran: Ran, name: str) -> list[list[dict[str, Any]]]:
    return ran[name].runs if name in ran else []


def agreement(ran: Ran, planned: Sequence[jobs.Job], out: Path) -> Iterator[Line]:
    """What is compared with stock or with itself, and what must be refused, as far as it was planned."""
    names = {job.name for job in planned}
    for heads, kv in product(jobs.HEADS, jobs.KV_DTYPES):
        yield from (line for line in _cell(ran, out, heads, kv) if line.name in names)
    if "override-fp8-h64-eager" in names:
        noise = _noise(ran, jobs.cell("fp8", 64))
        yield from _against(ran, out, "override-fp8-h64-eager", "stock-fp8-h64-eager", judge.limit(noise))
    if "untouched-fp8-h64-eager" in names:
        done = ran.get("untouched-fp8-h64-eager")
        chosen = (done.result or {}).get("impl") if done is not None else None
        yield Line("untouched-fp8-h64-eager", f"vLLM's own choice is {chosen}", chosen == ["FlashMLASparseImpl"])
    if any(name.startswith("requests-") for name in names):
        yield from _requests(ran)
    for name, done in ran.items():
        if done.job.task == "refuse":
            messages = (done.result or {}).get("refused", [])
            said = next((text for text in messages if done.job.options["says"] in text), None)
            yield Line(
                name, _short(said or f"expected {done.job.options['says']!r}: {messages or 'it started'}"), said is not None
            )


def _against_itself(ran: Ran, cell: str) -> list[tuple[judge.Run, judge.Run]]:
    """Stock's runs of a cell, eager and in graphs, each with each."""
    eager, graphs = _runs(ran, f"stock-{cell}-eager"), _runs(ran, f"stock-{cell}-graphs")
    return list(combinations([*eager, *graphs], 2)) if eager else []


def _noise(ran: Ran, cell: str) -> float:
    return judge.noise(*_against_itself(ran, cell), shortest=_LONG)


def _rounded(ran: Ran, cell: str) -> float:
    """How far rounding stock's attention once more moves short prompts' log-probabilities; 0 where that did not run."""
    stock, rounded = _runs(ran, f"stock-{cell}-eager"), _runs(ran, f"rounded-{cell}-eager")
    return judge.agree(rounded[0], stock[0], longest=_LONG - 1).difference if stock and rounded else 0.0


def _cell(ran: Ran, out: Path, heads: int, kv: str) -> Iterator[Line]:
    """One head count and cache format: stock's noise, then everybody against stock."""
    cell = jobs.cell(kv, heads)
    pairs, noise = _against_itself(ran, cell), _noise(ran, cell)
    short = max((judge.agree(*pair, longest=_LONG - 1).difference for pair in pairs), default=0.0)
    found = f"against itself: short {short:.3f}, long {noise:.3f}" if pairs else "did not finish"
    yield Line(f"stock-{cell}-eager", found, None if pairs else False)
    rounded = _rounded(ran, cell)
    yield Line(f"rounded-{cell}-eager", f"against stock: short {rounded:.3f}" if rounded else "did not finish", None)
    for who, mode in product(("plugin", "triton"), ("eager", "graphs", "default")):
        stock = f"stock-{cell}-{'eager' if mode == 'eager' else 'graphs'}"
        yield from _against(ran, out, f"{who}-{cell}-{mode}", stock, judge.limit(noise))


def _against(ran: Ran, out: Path, name: str, stock: str, limit: float) -> Iterator[Line]:
    ours, theirs = _runs(ran, name), _runs(ran, stock)
    if not ours or not theirs:
        yield Line(name, f"not compared: {name if not ours else stock} did not finish", False)
        return
    short = judge.agree(ours[0], theirs[0], longest=_LONG - 1)
    long = judge.agree(ours[0], theirs[0], shortest=_LONG)
    done = ran[name]
    served = bool(done.served) and (done.job.who != "triton" or "nvidia." not in done.served)
    passed = short.within(judge.TOLERANCE) and long.difference <= limit and served
    found = f"short {short}; long {long} (limit {limit:.2f})"
    if "MLA_PORTABLE_VLLM_SHADOW" in done.job.environ:
        file = out / f"{name}.shadow"
        shadow = judge.read_shadow(file.read_text().splitlines() if file.exists() else [])
        passed, found = passed and shadow.passed, f"{found}; shadow {shadow}"
    yield Line(name, found if served else f"{found}; served by {done.served or 'others'}", passed)


def _requests(ran: Ran) -> Iterator[Line]:
    found: dict[str, judge.Agreement] = {}
    for who in ("stock", "plugin"):
        one, small = (ran.get(f"requests-{who}-{way}") for way in ("one", "small"))
        if one is None or small is None or not one.runs or not small.runs or small.result is None:
            yield Line(f"requests-{who}", "did not finish", False)
            continue
        found[who] = judge.agree(small.runs[0], one.runs[0])
        lost = sum(len(p["tokens"]) != wanted for p, wanted in zip(small.runs[0], small.result["wanted"], strict=True))
        text = f"{len(small.runs[0])} requests, {lost} cut short, {small.result['preempted']} preemptions"
        limit = judge.limit(found["stock"].difference if "stock" in found else 0.0)
        right = lost == 0 and small.result["preempted"] > 0 and found[who].within(limit)
        yield Line(f"requests-{who}", f"{text}; one by one: {found[who]}", right if who == "plugin" else None)


def tensor_parallel(ran: Ran, out: Path) -> Iterator[Line]:
    """Two GPUs against one: sums are split, and so rounded, differently.

    The limit follows the differences of stock from its first run on one GPU: on two, and on one again.
    """
    limits: list[float] = []
    sides = ({"longest": _LONG - 1}, {"shortest": _LONG})
    for who in ("stock", "plugin"):
        one, two = _runs(ran, f"tp1-{who}"), _runs(ran, f"tp2-{who}")
        if not one or not two:
            yield Line(f"tp-{who}", "did not finish", False)
            continue
        parts = [judge.agree(one[0], two[0], **side) for side in sides]
        text = f"two GPUs against one: short {parts[0]}; long {parts[1]}"
        if who == "stock":
            runs = (*two, *one[1:])
            limits = [judge.limit(max(judge.agree(one[0], run, **side).difference for run in runs)) for side in sides]
            yield Line(
                "tp-stock", f"{text}; with {len(runs) - 1} more runs at most {limits[0]:.2f}, {limits[1]:.2f} are allowed"
            )
        else:
            limits = limits or [judge.TOLERANCE] * 2
            right = parts[0].within(limits[0]) and parts[1].difference <= limits[1] and bool(ran["tp2-plugin"].served)
            yield Line("tp-plugin", f"{text} (limits {limits[0]:.2f}, {limits[1]:.2f})", right)


def speed(ran: Ran) -> Iterator[Line]:
    """Builds, layers and steps, ours against stock's."""
    for name, done in ran.items():
        if done.result is None:
            yield Line(name, "did not finish", False)
            continue
        stock = ran.get(f"speed-stock-{jobs.cell(done.job.kv, done.job.heads)}")
        steps, theirs = done.result["steps"], (stock.result or {}).get("steps") if stock is not None else None
        text = f"a decode of {steps['batch']}: {steps['step_us']:.0f} us, build {steps['build_us']:.0f} us"
        counts = done.job.who == "plugin" and done.job.heads >= 64
        if done.job.who == "stock" or theirs is None:
            yield Line(name, text, False if counts else None)
        else:
            ratio = steps["step_us"] / theirs["step_us"]
            yield Line(name, f"{text}, {ratio:.3f} of stock's step", ratio <= _STEP_LIMIT if counts else None)
        yield from _builds(done, done.result.get("builds", {}))
        yield from _forwards(done.result.get("forwards", {}), counts)
        yield from _layers(done.result.get("layers", {}), counts)


def _builds(done: Done, builds: dict[str, Any]) -> Iterator[Line]:
    for batch, times in builds.items():
        (ours, ours_done), (other, other_done) = times["ours"], times["stock"]
        text = f"{ours:.0f} us ({ours_done:.0f} with the device), stock {other:.0f} ({other_done:.0f}): 1/{other / ours:.1f}"
        many = "256 decodes + 32" in batch and jobs.cell(done.job.kv, done.job.heads) == "fp8-h64"
        factor = _CHEAPER_BUILD if many else 1
        yield Line(f"  build {batch}", text, ours * factor <= other if done.job.who == "plugin" else None)


def _forwards(forwards: dict[str, dict[str, Any]], counts: bool) -> Iterator[Line]:
    for batch, times in forwards.items():
        (ours, ours_done), (other, other_done) = times["ours"], times["stock"]
        text = f"{ours:.0f} us ({ours_done:.0f} with the device), stock {other:.0f} ({other_done:.0f})"
        # decodes alone are replayed from a graph, and judged as layers
        right = ours_done <= _STEP_LIMIT * other_done if counts and "+" in batch else None
        yield Line(f"  forward {batch}", f"{text}; differ by {times['relative']:.1e}", right)


def _layers(layers: dict[str, Any], counts: bool) -> Iterator[Line]:
    for batch, times in layers.items():
        (ours, ours_step), (other, other_step) = times["ours"], times["stock"]
        text = f"{ours:.1f} us a layer, stock {other:.1f}: {ours / other:.3f}; with build {ours_step:.1f}, {other_step:.1f}"
        right = ours_step <= _STEP_LIMIT * other_step if counts else None
        yield Line(f"  layer, {batch} decodes", f"{text}; differ by {times['relative']:.1e}", right)
    kernels: dict[str, dict[str, float]] = [*layers.values()][-1]["kernels"] if layers else {}
    for who, spent in kernels.items():
        most = sorted(spent.items(), key=lambda item: -item[1])
        yield Line(f"    kernels, {who}", ", ".join(f"{_kernel(name)} {time}" for name, time in most))


def failures(ran: Ran) -> Iterator[str]:
    """Each error once, with the names of those that ended with it."""
    names: dict[str, list[str]] = {}
    for name, done in ran.items():
        if done.error:
            names.setdefault(done.error, []).append(name)
    for error, several in names.items():
        yield f"{', '.join(several)}:\n{error}"


def _kernel(name: str) -> str:
    """The name of a kernel without its namespaces and template arguments."""
    return name.partition("<")[0].partition("(")[0].removeprefix("void ").rpartition("::")[2][:24] or name[:24]


def _short(text: str, width: int = 160) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= width else f"{flat[: width - 3]}..."
