# SPDX-License-Identifier: Apache-2.0
"""Choose few combinations of many axes: every value, or every pair of values, at least once; always the same ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Choice = dict[str, Any]
_Target = frozenset[tuple[str, int]]


def anything(choice: Choice) -> bool:
    """No choice is refused."""
    return True


def crossed(axes: Mapping[str, Sequence[Any]], names: Sequence[str]) -> list[Choice]:
    """The cross product of the axes in `names`, in order."""
    return [dict(zip(names, values, strict=True)) for values in product(*(axes[name] for name in names))]


def covering(
    axes: Mapping[str, Sequence[Any]],
    *,
    strength: int,
    allowed: Callable[[Choice], bool] = anything,
    seeds: Iterable[Choice] = (),
) -> list[Choice]:
    """Combinations of one value per axis in which every `strength` values of different axes meet, where they may.

    A greedy covering array: take the first uncovered combination, complete it so that it covers as much as possible,
    repeat. No randomness; the order of the axes and of their values decides.

    Args:
        axes: values by name, in order of importance.
        strength: 1 for every value, 2 for every pair.
        allowed: judges a partial choice, False when nothing that contains it makes sense.
        seeds: partial choices that must each appear, completed, before anything else is added.
    """
    uncovered: dict[_Target, None] = {
        frozenset(target): None
        for names in combinations(axes, strength)
        for target in product(*([(name, i) for i in range(len(axes[name]))] for name in names))
    }
    used: Counter[tuple[str, int]] = Counter()
    chosen: list[dict[str, int]] = []

    def values(picks: Mapping[str, int]) -> Choice:
        return {name: axes[name][i] for name, i in picks.items()}

    def gain(picks: Mapping[str, int], name: str, i: int) -> int:
        return sum(frozenset((*group, (name, i))) in uncovered for group in combinations(picks.items(), strength - 1))

    def complete(picks: dict[str, int]) -> dict[str, int] | None:
        if not allowed(values(picks)):
            return None
        name = next((name for name in axes if name not in picks), None)
        if name is None:
            return picks
        ranked = sorted(range(len(axes[name])), key=lambda i: (-gain(picks, name, i), used[name, i], i))
        for i in ranked:
            found = complete({**picks, name: i})
            if found is not None:
                return found
        return None

    def take(picks: dict[str, int]) -> None:
        chosen.append(picks)
        used.update(picks.items())
        for group in combinations(picks.items(), strength):
            uncovered.pop(frozenset(group), None)

    for seed in seeds:
        found = complete({name: list(axes[name]).index(value) for name, value in seed.items()})
        if found is not None:
            take(found)
    while uncovered:
        target = next(iter(uncovered))
        found = complete(dict(target))
        if found is None:
            del uncovered[target]  # these values never meet
        else:
            take(found)
    return [values(picks) for picks in chosen]
