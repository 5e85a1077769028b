# SPDX-License-Identifier: Apache-2.0
"""Converter: the convert_indices of a route, and what follows from it for the attention that reads its slots."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mla_portable.attention.layer_registry import LayerRegistry
from mla_portable.contracts import Decision, Implementation, Request
from mla_portable.primitives import SPARSE_DECODE


@dataclass(frozen=True, slots=True)
class Converter:
    """What is known of convert_indices before it is known what it serves.

    Attributes:
        plain: the decision, for calls with `seq_lens` where the implementation takes them. compacting: likewise, with
            `compact`; None where it does not compact. ends_in_order: `Support.ends_in_order` of the implementation.
    """

    plain: Decision
    compacting: Decision | None
    ends_in_order: bool

    @classmethod
    def of(cls, request: Request, registry: LayerRegistry) -> Converter:
        """For a request of convert_indices."""
        plain = registry.decide(request)
        found = registry.chosen(plain)
        if found is None:
            return cls(plain, None, False)
        if found.support.seq_lens:
            plain = registry.also(plain, seq_lens=True)
        compacting = registry.also(plain, compact=True) if found.support.compact else plain
        return cls(plain, compacting if compacting.request.compact else None, found.support.ends_in_order)

    def followed_by(self, request: Request, registry: LayerRegistry, *, clean: bool) -> Decision:
        """On attention over the indices, with the promises that hold for them.

        A token early in its sequence has fewer than K keys. An implementation that skips missing keys is given lengths, the
        counts of compacted indices; one whose schedule assumes K keys in every row is not.

        Args:
            clean: they are slots of the cache. Rows of a workspace may lie past its end.
        """
        in_order = self.ends_in_order and request.primitive is SPARSE_DECODE  # what comes right behind the conversion
        decision = registry.decide(request.but(clean_indices=clean, follows_in_order=in_order))
        if self.compacting is None or not skips_missing_keys(registry.chosen(decision)):
            return decision
        return registry.also(decision, lengths=True, clean_lengths=True)

    def decision(self, followers: Iterable[Decision]) -> Decision:
        """On convert_indices, for what follows it: compacting where any is given lengths."""
        return self.compacting if self.compacting and any(each.request.lengths for each in followers) else self.plain


def skips_missing_keys(found: Implementation | None) -> bool:
    """It reads only as many entries of a row as lengths say, and is faster for it."""
    if found is None or not found.support.lengths:
        return False
    kind = found.schedule_kind if found.primitive is SPARSE_DECODE else None
    return kind is None or not kind.assumes_topk
