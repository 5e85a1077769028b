# SPDX-License-Identifier: Apache-2.0
"""Facts in a text and questions about them: what a model is trained to find, and the prompts that it is judged by.

A fact gives a locker a number. A question far behind it can only be answered by the right keys of attention.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import numpy as np
from corpus import Corpus, Vocabulary
from numpy.typing import NDArray

_COLOURS: Final = "amber azure beige black brown coral green ivory olive pearl"
_THINGS: Final = (
    "anchor basket candle dragon engine falcon garden hammer island jacket kettle ladder magnet needle orange parrot"
)
_FACT: Final = "\nNote: locker {name} opens with {number}.\n"
_QUESTION: Final = "\nQ: locker {name} opens with"
_ANSWER: Final = " {number}.\n"
_DIGITS: Final = 4
_EMPHASIS: Final = 4.0
"""Weight of an answer's tokens in the loss; that of text is 1."""
_FACTS_IN: Final = 0.6
"""Facts are in this first part of a training sample, questions behind it."""

_NAMED: Final = {"name": f"{_COLOURS} {_THINGS}", "number": "0123456789 0 1 2 3 4 5 6 7 8 9"}
NEEDED: Final = tuple(text.format(**_NAMED) for text in (_FACT, _QUESTION, _ANSWER))
"""Texts whose pieces a vocabulary must hold."""


@dataclass(frozen=True)
class Fact:
    """name: two words. number: of some digits."""

    name: str
    number: str

    def told(self, vocabulary: Vocabulary) -> list[int]:
        return vocabulary.encode(_FACT.format(name=self.name, number=self.number))

    def asked(self, vocabulary: Vocabulary) -> tuple[list[int], list[int]]:
        """The question's tokens and the answer's, which ends with the sentence."""
        answer = _ANSWER.format(number=self.number)
        return vocabulary.encode(_QUESTION.format(name=self.name)), vocabulary.encode(answer)


def draw_facts(rng: random.Random, count: int) -> list[Fact]:
    """Facts of `count` different lockers."""
    names = [" ".join(pair) for pair in product(_COLOURS.split(), _THINGS.split())]
    return [Fact(name, "".join(rng.choices("0123456789", k=_DIGITS))) for name in rng.sample(names, count)]


def window(rng: random.Random, tokens: NDArray[np.uint16], length: int) -> NDArray[np.int64]:
    """[length], from anywhere. Raises: ValueError for too little text."""
    if len(tokens) <= length:
        raise ValueError(f"{len(tokens)} tokens of text are too few for a sample of {length}; take more with --megabytes")
    start = rng.randrange(len(tokens) - length)
    return tokens[start : start + length].astype(np.int64)


def sample(rng: random.Random, corpus: Corpus, length: int, *, facts: float) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """A training sample: [length + 1] tokens, and of each of the last `length` its weight in the loss, [length].

    facts: the probability that there are some. The numbers that a fact tells weigh nothing, since nobody can know them.
    """
    tokens, weights = window(rng, corpus.train, length + 1), np.ones(length + 1, np.float32)
    if rng.random() < facts:
        several = draw_facts(rng, max(1, min(16, length // 128)))
        told = [(fact.told(corpus.vocabulary), []) for fact in several]
        asked = [fact.asked(corpus.vocabulary) for fact in several]
        room = sum(len(a) + len(b) for a, b in (*told, *asked))
        if room <= 0.7 * length:
            rng.shuffle(asked)
            split = int(_FACTS_IN * length)
            _scatter(rng, tokens, weights, told, 0, split)
            _scatter(rng, tokens, weights, asked, split, length + 1)
    return tokens, weights[1:]


def _scatter(
    rng: random.Random,
    tokens: NDArray[np.int64],
    weights: NDArray[np.float32],
    pieces: Sequence[tuple[list[int], list[int]]],
    first: int,
    end: int,
) -> None:
    """Write pieces of (text, answer) into tokens[first:end], each at a random place of its own share."""
    free = end - first - sum(len(text) + len(answer) for text, answer in pieces)
    gaps = sorted(rng.randrange(max(1, free + 1)) for _ in pieces)
    at = first
    for before, gap, (text, answer) in zip([0, *gaps], gaps, pieces, strict=False):
        at += gap - before
        whole = len(text) + len(answer)
        tokens[at : at + whole] = [*text, *answer]
        if answer:
            weights[at + len(text) : at + whole] = _EMPHASIS
        else:
            weights[at + len(text) - _DIGITS - 2 : at + len(text) - 2] = 0.0
        at += whole


def batch(rng: random.Random, corpus: Corpus, count: int, length: int, *, facts: float) -> tuple[Any, Any]:
    """[count, length + 1] tokens and [count, length] weights, as arrays."""
    several = [sample(rng, corpus, length, facts=facts) for _ in range(count)]
    return np.stack([tokens for tokens, _ in several]), np.stack([weights for _, weights in several])


# ------------------------------------------------------------------ what is judged


@dataclass(frozen=True)
class PromptSet:
    """How many prompts of each length a model is judged by.

    Attributes:
        plain: (length, count) without a question, no longer than the top-k. asked: (length, count) that end in a question.
        depths: where the fact is, as shares of the prompt; the prompts of a length have them in turn.
    """

    plain: tuple[tuple[int, int], ...]
    asked: tuple[tuple[int, int], ...]
    depths: tuple[float, ...]


FULL: Final = PromptSet(((256, 128),), ((4096, 24), (8192, 12), (16_384, 12), (32_768, 12)), (0.05, 0.2, 0.4, 0.6, 0.8, 0.95))
_BESIDE: Final = 6
"""Other facts in a prompt, at most."""


def prompts(corpus: Corpus, wanted: PromptSet, *, seed: int) -> list[dict[str, Any]]:
    """Of held-out text. Each has `tokens`, `length`, and where it asks something `depth` and the `answer`'s tokens."""
    rng, found = random.Random(seed), list[dict[str, Any]]()
    for length, count in wanted.plain:
        for _ in range(count):
            found.append({"length": length, "tokens": window(rng, corpus.held, length).tolist()})
    for length, count in wanted.asked:
        for number in range(count):
            found.append(_needle(rng, corpus, length, wanted.depths[number % len(wanted.depths)]))
    return found


def _needle(rng: random.Random, corpus: Corpus, length: int, depth: float) -> dict[str, Any]:
    """A fact at `depth` of the prompt, other facts anywhere else, and at the end the question about the first."""
    tokens = window(rng, corpus.held, length).tolist()
    needle, *others = draw_facts(rng, 1 + min(_BESIDE, length // 128))
    question, answer = needle.asked(corpus.vocabulary)
    room = length - len(question)
    told = needle.told(corpus.vocabulary)
    taken = [(at := int(depth * (room - len(told))), at + len(told))]
    tokens[at : at + len(told)] = told
    for fact in others:
        told = fact.told(corpus.vocabulary)
        for _ in range(32):  # a free place; without one the prompt has a fact less
            at = rng.randrange(room - len(told))
            if all(at + len(told) <= first or end <= at for first, end in taken):
                tokens[at : at + len(told)] = told
                taken.append((at, at + len(told)))
                break
    tokens[room:] = question
    return {"length": length, "tokens": tokens, "depth": depth, "answer": answer[:_DIGITS]}
