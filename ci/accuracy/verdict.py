# SPDX-License-Identifier: Apache-2.0
"""From what engines made of the same tokens to a verdict: each beside stock, within what stock differs from itself by.

Every engine reads the same prompts, so that each token has a log-probability in all of them. Two engines differ

- at a token: the mean of the absolute differences, and their 99th percentile. Roundings and near-ties of the selection do
  that to two correct engines too;
- on the whole: the mean of the differences, the logarithm of a ratio of perplexities. Rounding has no sign, so it is near 0,
  and a key that is lost shows;
- by scale: how much larger one's scale of attention's scores would have to be to explain the differences, by least squares on
  the slopes that the trained network has in float32. 2 % is 0.02;
- in answers.

Limits are what stock's engines differ by among each other: with steps of other sizes, and with a BF16 cache by another kernel.
Where prompts go over keys of each head, new tokens do not pass through an FP8 cache, and there the two caches of stock count
too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Final

import judge
import numpy as np
from asked_engines import Asked
from numpy.typing import NDArray

from mla_portable.capability.run import EngineAccuracy

MARGIN: Final = 1.5
"""Times what stock differs from itself by."""
ERRORS: Final = 5.0
"""Standard errors of a mean that is 0 where nothing is wrong."""
LEAST, MOST = 2e-3, 0.1
"""A mean absolute difference that is never too much, since one rounding of a hidden state to bfloat16 changes as much, and one
that always is, whatever stock's engines do. Of the 99th percentile ten times these."""
ANSWERED: Final = 20 / 24
"""Share of the questions at the first length that stock must answer: a model that does not is no judge."""
MISSED: Final = 1
"""More answers than stock's worst engine may be wrong at a length."""

Prompts = Sequence[Mapping[str, Any]]
Scored = Sequence[Mapping[str, Any]]
"""Of each prompt what `engine.score` leaves."""


@dataclass(frozen=True)
class Apart:
    """How two engines differ over the prompts of a length.

    Attributes:
        mean, p99: of the absolute differences. drift: mean difference. error: its standard error.
        scale, scale_error: of the other scale that explains the differences, and its standard error; None without slopes.
    """

    tokens: int
    mean: float
    p99: float
    drift: float
    error: float
    scale: float | None = None
    scale_error: float | None = None

    def __str__(self) -> str:
        text = f"mean {self.mean:.4f}, p99 {self.p99:.3f}, drift {self.drift:+.5f}"
        return text if self.scale is None else f"{text}, scale {100 * self.scale:+.2f} %"


def apart(one: Scored, other: Scored, prompts: Prompts, length: int) -> Apart:
    """`one` against `other` over the prompts of a length. A difference that is no number is infinite."""
    differences = _logprobs(one, prompts, length) - _logprobs(other, prompts, length)
    count = len(differences)
    if not np.isfinite(differences).all():
        return Apart(count, math.inf, math.inf, math.inf, 0.0)
    sizes = np.abs(differences)
    figures = sizes.mean(), np.quantile(sizes, 0.99), differences.mean(), differences.std() / math.sqrt(count)
    found = Apart(count, *map(float, figures))
    slopes = np.array([slope for prompt in prompts if prompt["length"] == length for slope in prompt.get("slopes", ())])
    if len(slopes) != count:
        return found
    squares = float(slopes @ slopes)
    scale = float(differences @ slopes) / squares
    rest = float(np.square(differences - scale * slopes).mean())
    return replace(found, scale=scale, scale_error=math.sqrt(rest / squares))


def _logprobs(scored: Scored, prompts: Prompts, length: int) -> NDArray[np.float64]:
    """Of all tokens of the prompts of a length. Raises: ValueError for results of other prompts."""
    several = [each["logprobs"] for each, prompt in zip(scored, prompts, strict=True) if prompt["length"] == length]
    found = np.concatenate([np.asarray(each, np.float64) for each in several])
    if len(found) != len(several) * (length - 1):
        raise ValueError(f"results of other prompts: {len(found)} tokens of {len(several)} prompts of {length}")
    return found


@dataclass(frozen=True)
class Limits:
    """What an engine may differ from stock by at a length."""

    mean: float
    p99: float
    drift: float
    scale: float

    def broken(self, found: Apart) -> list[str]:
        """The figures that are beyond, in words."""
        beyond = {
            "mean": (found.mean, self.mean),
            "p99": (found.p99, self.p99),
            "drift": (abs(found.drift), self.drift + ERRORS * found.error),
        }
        if found.scale is not None and found.scale_error is not None:
            beyond["scale"] = abs(found.scale), self.scale + ERRORS * found.scale_error
        return [f"{name} {value:.4g} above {limit:.4g}" for name, (value, limit) in beyond.items() if not value <= limit]


def limits(several: Sequence[Apart]) -> Limits:
    """From stock's own differences."""
    return Limits(
        min(MOST, MARGIN * max(LEAST, *(each.mean for each in several))),
        min(10 * MOST, MARGIN * max(10 * LEAST, *(each.p99 for each in several))),
        MARGIN * max(abs(each.drift) for each in several),
        MARGIN * max(abs(each.scale or 0.0) for each in several),
    )


def perplexity(scored: Scored, prompts: Prompts, length: int) -> tuple[int, float]:
    """(tokens, perplexity) of the prompts of a length."""
    own = _logprobs(scored, prompts, length)
    return len(own), math.exp(-float(own.mean()))


def answered(scored: Scored, prompts: Prompts, length: int) -> tuple[Counter[str], Counter[str]]:
    """Right answers and questions of a length, by depth in percent."""
    right, asked = Counter[str](), Counter[str]()
    for each, prompt in zip(scored, prompts, strict=True):
        if prompt["length"] == length and "answer" in prompt:
            depth = f"{100 * prompt['depth']:.0f}"
            asked[depth] += 1
            right[depth] += each["tokens"][: len(prompt["answer"])] == prompt["answer"]
    return right, asked


class Verdict:
    """Of one trained model. done: of each engine that ran, what it left. prompts: that all of them read."""

    def __init__(self, done: Mapping[Asked, judge.Done], prompts: Prompts) -> None:
        self.done, self.prompts = done, prompts
        self.scored: dict[Asked, Scored] = {asked: each.result["prompts"] for asked, each in done.items() if each.result}
        self.lengths = sorted({prompt["length"] for prompt in prompts})
        self._apart: dict[tuple[Asked, Asked, int], Apart] = {}

    def stock(self, cache: str, *, per_head: bool = False) -> list[Asked]:
        """Stock's engines that ran: over the latent cache, or where prompts may go over keys of each head."""
        return [asked for asked in self.scored if asked.is_stock and (asked.cache, asked.per_head) == (cache, per_head)]

    def reference(self, asked: Asked) -> Asked | None:
        """What an engine is compared with."""
        return next((each for each in self.stock(asked.cache) if each.who == "stock" and not each.variant), None)

    def apart(self, one: Asked, other: Asked, length: int) -> Apart:
        key = one, other, length
        if key not in self._apart:
            self._apart[key] = apart(self.scored[one], self.scored[other], self.prompts, length)
        return self._apart[key]

    def limits(self, asked: Asked, length: int) -> Limits | None:
        """None where stock has fewer than two engines to say how it differs from itself, or one whose text is no number."""
        reference = self.reference(asked)
        pairs = [pair for cache in {asked.cache, "bf16"} for pair in combinations(self.stock(cache), 2)]
        if reference is not None and asked.per_head:
            others = self.stock(asked.cache, per_head=True)
            others += self.stock("bf16")[:1] if asked.cache == "fp8" else []
            pairs += [(reference, other) for other in others]
        several = [self.apart(*pair, length) for pair in pairs]
        return limits(several) if several and all(math.isfinite(each.mean) for each in several) else None

    def broken(self, asked: Asked, length: int) -> list[str] | None:
        """What is beyond a limit at a length, in words; None where nothing can be said."""
        reference, limits = self.reference(asked), self.limits(asked, length)
        if reference is None or limits is None:
            return None
        found = limits.broken(self.apart(asked, reference, length))
        rights = [sum(answered(self.scored[each], self.prompts, length)[0].values()) for each in self.stock(asked.cache)]
        right, questions = (sum(each.values()) for each in answered(self.scored[asked], self.prompts, length))
        if questions and right < min(rights) - MISSED:
            found.append(f"answers {right} below {min(rights)} - {MISSED}")
        return found

    def lines(self) -> Iterator[judge.Line]:
        """A line for each engine that was asked, at each length; one for a fault."""
        for asked, done in self.done.items():
            if asked not in self.scored:
                compared = not asked.is_stock or asked == Asked(asked.model, "stock", asked.cache, False)
                yield judge.Line(asked.name, f"did not finish: {done.error}", False if compared else None)
            elif asked.fault:
                yield self._fault(asked)
            else:
                yield from self._engine(asked, done)

    def _engine(self, asked: Asked, done: judge.Done) -> Iterator[judge.Line]:
        reference = self.reference(asked)
        if asked.is_stock and asked == reference:
            yield self._judges(asked)
        wrongly = "" if asked.is_stock else judge.served_wrongly(done)
        ways = done.result["per_head"]
        if (asked.who == "plugin" and asked.per_head and not ways) or (ways and not asked.per_head):
            wrongly = wrongly or f"{ways} tokens went over keys of each head"
        for length in self.lengths:
            _, value = perplexity(self.scored[asked], self.prompts, length)
            right, questions = (sum(each.values()) for each in answered(self.scored[asked], self.prompts, length))
            text = f"{length}: perplexity {value:.4f}" + (f", answers {right}/{questions}" if questions else "")
            if reference is None or asked == reference:
                yield judge.Line(asked.name, text, None if asked.is_stock else False)
                continue
            text += f", beside {reference.name}: {self.apart(asked, reference, length)}"
            broken = self.broken(asked, length)
            if asked.is_stock:
                yield judge.Line(asked.name, text, None)
            elif broken is None:
                yield judge.Line(asked.name, f"{text}; nothing says how stock differs from itself", False)
            else:
                problems = [*broken, *filter(None, (wrongly,))]
                yield judge.Line(asked.name, "; ".join([text, *problems]), not problems)

    def _judges(self, asked: Asked) -> judge.Line:
        """The model answers enough for its answers to say something."""
        length = next((length for length in self.lengths if answered(self.scored[asked], self.prompts, length)[1]), 0)
        right, questions = (sum(each.values()) for each in answered(self.scored[asked], self.prompts, length))
        text = f"the model answers {right} of {questions} at {length}, at least {ANSWERED * questions:.0f} wanted"
        return judge.Line(asked.name, text, right >= ANSWERED * questions > 0)

    def _fault(self, asked: Asked) -> judge.Line:
        """A planted fault is seen: at some length something is beyond its limit."""
        broken = {length: self.broken(asked, length) for length in self.lengths}
        seen = [f"{length}: {', '.join(found)}" for length, found in broken.items() if found]
        reference = self.reference(asked)
        if reference is None or all(found is None for found in broken.values()):
            return judge.Line(asked.name, "nothing to compare the fault with", False)
        missed = "; ".join(f"{length}: {self.apart(asked, reference, length)}" for length in self.lengths)
        return judge.Line(asked.name, f"seen at {'; '.join(seen)}" if seen else f"NOT SEEN: {missed}", bool(seen))

    def records(self, engine: str) -> Iterator[EngineAccuracy]:
        """As a run keeps them: of each engine and length, unless its perplexity is no number. engine: name and version."""
        for asked, scored in self.scored.items():
            reference = self.reference(asked)
            for length in self.lengths:
                tokens, value = perplexity(scored, self.prompts, length)
                if not math.isfinite(value):
                    continue
                right, questions = answered(scored, self.prompts, length)
                given: dict[str, Any] = {"engine": engine, "model": asked.model, "backend": asked.who, "cache": asked.cache}
                given |= {"per_head": asked.per_head, "variant": asked.variant, "length": length, "tokens": tokens}
                given |= {"perplexity": value, "right": dict(right), "asked": dict(questions)}
                if reference is not None and asked != reference:
                    found = self.apart(asked, reference, length)
                    if math.isfinite(found.mean):
                        given |= {"mean": found.mean, "p99": found.p99, "drift": found.drift, "scale": found.scale}
                yield EngineAccuracy.model_validate(given)
