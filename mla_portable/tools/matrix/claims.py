# SPDX-License-Identifier: Apache-2.0
"""Claims: what implementations declare, as plain data, so that the matrix is drawn without loading torch or a plugin."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from mla_portable.tools.matrix.errors import RecordError

__all__ = ["LAYOUT_FREE", "Claim", "Declarations", "Objection", "load_declarations", "wider"]

LAYOUT_FREE: Final = ("convert_indices", "merge_states", "quantize_per_tensor", "indexer_logits")
"""Primitives whose work does not depend on the layout of a cache."""
_SETS: Final = ("device_types", "vendors", "archs", "kv_layouts", "num_heads", "padded_heads", "block_sizes", "scale_formats")
_LIMITS: Final = ("max_heads", "max_topk", "max_query_len")
_MULTIPLES: Final = ("topk_multiple", "block_size_multiple", "cache_alignment")
_FEATURES: Final = ("lse", "attn_sink", "lengths", "compact", "prefill_workspace", "batch_invariant", "graph")
_NEEDS: Final = ("needs_bf16", "needs_fp8_conversion", "needs_whole_rows", "min_shared_memory")
_EMPTY_IS_NONE: Final = ("padded_heads", "kv_layouts", "scale_formats")
_HEADS: Final = ("num_heads", "max_heads", "padded_heads")


@dataclass(frozen=True, slots=True)
class Objection:
    """Why a declaration excludes a device: a Reason of the contracts, as text."""

    subject: str
    given: str
    limit: str

    def __str__(self) -> str:
        return f"{self.subject} {self.given} ({self.limit})"


@dataclass(frozen=True, slots=True)
class Claim:
    """One implementation of one primitive.

    Attributes:
        plugin, module, distribution, version: what brought it. preference: its declared cost.
        sources: modules its evidence is bound to. support: the declaration, as JSON holds it.
        targets: architectures that its plugin compiles for ahead of time, () where it cannot.
        core: it belongs to the core distribution, so that a CPU runs it as it is.
        devices: profile slug -> objections; empty where the declaration includes the device.
    """

    implementation: str
    primitive: str
    plugin: str
    module: str
    distribution: str
    version: str
    preference: float
    core: bool
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    support: Mapping[str, Any]
    devices: Mapping[str, tuple[Objection, ...]]

    @property
    def layouts(self) -> tuple[str | None, ...]:
        """The rows that the claim fills in the matrix."""
        return (None,) if self.primitive in LAYOUT_FREE else tuple(self.support["kv_layouts"])


@dataclass(frozen=True, slots=True)
class Declarations:
    """Everything that is declared. missing: plugins that did not load, with why."""

    claims: tuple[Claim, ...]
    missing: tuple[tuple[str, str], ...] = ()

    def text(self) -> str:
        """The file's content."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"


def load_declarations(path: Path) -> Declarations:
    """Read what `Declarations.text` wrote. Raises: RecordError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        claims = tuple(_claim(each) for each in data["claims"])
        return Declarations(claims, tuple((name, why) for name, why in data["missing"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = "run ci/refresh_evidence, or `mla-portable matrix --write`"
        raise RecordError(str(path), f"{type(error).__name__}: {error}; {remedy}") from error


def _claim(data: dict[str, Any]) -> Claim:
    devices = {slug: tuple(Objection(**each) for each in found) for slug, found in data["devices"].items()}
    fields: dict[str, Any] = {**data, "sources": tuple(data["sources"]), "targets": tuple(data["targets"]), "devices": devices}
    return Claim(**fields)


def _set(support: Mapping[str, Any], name: str) -> set[Any] | None:
    """The allowed values; None for no limit."""
    value: Sequence[Any] | None = support.get(name)
    if value is None and name in _EMPTY_IS_NONE:
        return set()
    return None if value is None else set(value)


def wider(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What declaration `new` claims beyond `old`, in words; [] when everything it claims was claimed before."""
    found: list[str] = []
    for name in _SETS:
        if name in _HEADS:
            continue
        before, after = _set(old, name), _set(new, name)
        if before is not None and (after is None or after - before):
            more = "any" if after is None else ", ".join(sorted(map(str, after - before)))
            found.append(f"{name} {more} (evidence covers {', '.join(sorted(map(str, before))) or 'none'})")
    found += _wider_heads(old, new)
    for name in _LIMITS:
        before, after = old.get(name), new.get(name)
        if name not in _HEADS and before is not None and (after is None or after > before):
            found.append(f"{name} {'without limit' if after is None else after} (evidence covers {before})")
    for name in _MULTIPLES:
        if new.get(name, 1) % old.get(name, 1):
            found.append(f"{name} {new.get(name, 1)} (evidence covers {old.get(name, 1)})")
    found += [f"{name} (evidence is without)" for name in _FEATURES if new.get(name) and not old.get(name)]
    found += [
        f"{name} {new.get(name)} (evidence has {old.get(name)})" for name in _NEEDS if new.get(name, 0) < old.get(name, 0)
    ]
    return found


def _wider_heads(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Head counts are one claim in three fields: all absent means every count."""
    highest = max([new.get("max_heads") or 0, *(new.get("num_heads") or ()), *(new.get("padded_heads") or ())])
    if not any(old.get(name) for name in _HEADS):
        return []
    if not highest:
        return ["num_heads any (evidence covers a limited set)"]
    more = [heads for heads in range(1, highest + 1) if _accepts(new, heads) and not _accepts(old, heads)]
    return [f"num_heads {_ranges(more)} (evidence is without)"] if more else []


def _accepts(support: Mapping[str, Any], heads: int) -> bool:
    return (
        heads in (support.get("num_heads") or ())
        or heads <= (support.get("max_heads") or 0)
        or any(heads <= padded for padded in support.get("padded_heads") or ())
    )


def _ranges(values: Sequence[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"
