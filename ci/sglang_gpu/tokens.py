# SPDX-License-Identifier: Apache-2.0
"""Two engines' greedy tokens, compared: equal up to where their log-probabilities say that two tokens were as likely."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

CLOSE: Final = 0.1
"""Log-probabilities of the tokens that both chose differ by at most this (ci/vllm_gpu/checkpoint.py says why)."""


def compare(stock: Mapping[str, Any], ours: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether every prompt's tokens agree until the first tie, and how much of them was compared."""
    compared, worst, apart = 0, 0.0, 0
    total = sum(len(each) for each in stock["tokens"])
    for tokens, others, logs, more in zip(stock["tokens"], ours["tokens"], stock["logprobs"], ours["logprobs"], strict=True):
        for token, other, log, another in zip(tokens, others, logs, more, strict=True):
            worst = max(worst, abs(log - another))
            if token != other:
                apart += 1
                break
            compared += 1
    passed = worst <= CLOSE and compared >= total // 4
    return passed, f"{compared} of {total} tokens equal, {apart} prompts part at a tie, log-probabilities within {worst:.3f}"


def judge_engines(told: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[tuple[bool, str]]:
    """A line for each cache: stock beside the plugin."""
    found = {line["name"]: line for lines in told.values() for line in lines}
    for cache in ("fp8_e4m3", "bfloat16"):
        stock, ours = (found.get(f"engine {mode} {cache}", {}) for mode in ("off", "on"))
        if "tokens" not in stock or "tokens" not in ours:
            yield False, f"engine {cache}: {'stock' if 'tokens' not in stock else 'the plugin'} gave no tokens"
            continue
        passed, words = compare(stock, ours)
        speeds = f"{stock.get('tokens_per_second')} tokens/s stock, {ours.get('tokens_per_second')} with the plugin"
        yield passed, f"engine {cache}: {words}; {speeds}"
