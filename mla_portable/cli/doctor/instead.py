# SPDX-License-Identifier: Apache-2.0
"""What serves an engine instead of the plugin, as its log or its server says, and what to do so that the plugin serves."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, NamedTuple

_CHOSEN: Final = re.compile(
    r"\bUsing (?:AttentionBackendEnum\.)?([A-Z][A-Z0-9_]{1,60}|XPU MLA Sparse|Sparse MLA)(?: attention)? backend"
    r"(?:\.| out of potential backends| \(selected)"
)
"""vLLM's choice of a backend, in 0.17 to 0.33."""
_OURS: Final = re.compile(r"mla_portable serves in place of (\w{1,60}):")
_VLLM: Final = re.compile(r"\bInitializing a V1 LLM engine \(v([0-9][\w.+]{0,60})\)|\bvLLM server version ([0-9][\w.+]{0,60})")
_UNREGISTERED: Final = re.compile(r"Backend (?:CUSTOM|MLA_PORTABLE) must be registered before use")
_SGLANG: Final = re.compile(r"\bUse dsa attention backend for|\bDSA backends\b")
_SGLANG_CHOSEN: Final = re.compile(r"\bDSA backends\b.{0,200}?prefill=(\w{1,40}), decode=(\w{1,40})")
_HOOKS: Final = "mla_portable hooks "
_MOST: Final = 20
"""Names that are kept of a log."""
_CUSTOM: Final = ("CUSTOM", "MLA_PORTABLE")
"""The names under which the plugin registers itself with vLLM."""
REPLACED: Final = ("flashmla_kv", "flashmla_sparse", "flashmla_auto", "fa3")
"""Implementations of SGLang's DSA backend that the plugin replaces (`engines.sglang.model.METHOD_OF`)."""

START_VLLM: Final = (
    "start vLLM with --attention-backend CUSTOM, or with MLA_PORTABLE_VLLM=override in its environment, which replaces "
    "FLASHMLA_SPARSE alone"
)
START_SGLANG: Final = (
    "start SGLang with MLA_PORTABLE_SGLANG=on in its environment, and with --dsa-prefill-backend and --dsa-decode-backend out "
    f"of {', '.join(REPLACED)}"
)
_DOCTOR: Final = "run `mla-portable doctor` where the engine runs: it says whether the engine loads the plugin"


class Answer(NamedTuple):
    """Whether the plugin serves, None where that cannot be said; why, and what to do."""

    serves: bool | None
    why: str
    remedy: str


@dataclass(slots=True)
class Said:
    """What an engine's log says of the engine, read line by line.

    Attributes:
        engine: "vLLM", "SGLang", or "" where no line says it. version: "" likewise.
        chosen: backends that vLLM chose. replaced: registered names in whose place the plugin serves.
        implementations: of prefill and decode, that SGLang chose; None where no line says it.
        hooks: the plugin hooked SGLang. unregistered: vLLM was asked for the plugin's backend and does not have it.
    """

    engine: str = ""
    version: str = ""
    chosen: dict[str, None] = field(default_factory=dict[str, None])
    replaced: set[str] = field(default_factory=set[str])
    implementations: tuple[str, str] | None = None
    hooks: bool = False
    unregistered: bool = False

    def read(self, line: str) -> None:
        """Take in a line of bounded length."""
        if begin := _VLLM.search(line):
            self.engine, self.version = "vLLM", begin[1] or begin[2]
        if (chosen := _CHOSEN.search(line)) and len(self.chosen) < _MOST:
            self.engine = self.engine or "vLLM"
            self.chosen[chosen[1]] = None
        if (ours := _OURS.search(line)) and len(self.replaced) < _MOST:
            self.replaced.add(ours[1])
        self.unregistered |= _UNREGISTERED.search(line) is not None
        if _SGLANG.search(line) or _HOOKS in line:
            self.engine = self.engine or "SGLang"
            self.hooks |= _HOOKS in line
        if pair := _SGLANG_CHOSEN.search(line):
            self.implementations = pair[1], pair[2]

    @property
    def stock(self) -> tuple[str, ...]:
        """vLLM's own backends for sparse MLA that it chose."""
        return tuple(
            name for name in self.chosen if "MLA" in name.upper() and "SPARSE" in name.upper() and name not in self.replaced
        )


def in_vllm(said: Said) -> Answer:
    """Of a log of vLLM in which no line of the plugin says that it serves."""
    if said.unregistered:
        why = "vLLM was asked for the plugin's backend, which is not registered: vLLM did not load the plugin"
        return Answer(False, why, f"{_DOCTOR}; check VLLM_PLUGINS; install mla-portable again in vLLM's environment")
    if said.stock:
        why = f"another backend serves: vLLM chose {', '.join(said.stock)}, which is its own, not the plugin's"
        return Answer(False, why, START_VLLM)
    ours = [name for name in said.chosen if name in (*_CUSTOM, *said.replaced)]
    if ours:
        why = f"vLLM chose {', '.join(ours)}, and no line of the plugin says what serves its layers"
        return Answer(None, why, f"take a log from the engine's start until it serves, at level INFO; {_DOCTOR}")
    if said.chosen:
        why = f"another backend serves: vLLM chose {', '.join(said.chosen)}, none of which is for sparse MLA"
        return Answer(False, why, "serve a model with sparse MLA, such as DeepSeek-V3.2; the plugin serves no other attention")
    why = "no line of the plugin says that it serves, and none of the engine which backend it chose"
    start = f"{START_VLLM}; " if said.engine else ""
    return Answer(False, why, f"take a log from the engine's start, at level INFO; {start}{_DOCTOR}")


def in_sglang(implementations: tuple[str, str] | None, hooks: bool | None) -> Answer:
    """Of an SGLang in which nothing says that the plugin serves.

    Args:
        implementations: of prefill and decode, None where they are not known. hooks: the plugin hooked SGLang, None where that
            is not known.
    """
    if hooks is False:
        why = "SGLang's own kernels serve: no line of the plugin says that it hooked SGLang"
        return Answer(False, why, f"{_DOCTOR}; check SGLANG_PLUGINS and MLA_PORTABLE_SGLANG; then {START_SGLANG}")
    if implementations is None:
        return Answer(False, "SGLang's own kernels serve", START_SGLANG)
    prefill, decode = implementations
    chosen = f"--dsa-prefill-backend {prefill} and --dsa-decode-backend {decode}"
    left = [name for name in dict.fromkeys(implementations) if name not in REPLACED]
    what = f", and the plugin does not replace {', '.join(left)}" if left else ""
    return Answer(False, f"SGLang's own kernels serve: it runs with {chosen}{what}", START_SGLANG)
