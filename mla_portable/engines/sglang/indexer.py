# SPDX-License-Identifier: Apache-2.0
# pyright: basic
"""Whose functions score the indexer's keys: DeepGEMM's, or those of `mla_portable.deep_gemm` by the same names.

SGLang 0.5.23 asks four functions for them; 0.5.16 calls DeepGEMM's module, in whose place a `LateDeepGemm` stands there, as it
does in 0.5.23's indexer of pools of keys.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final, NamedTuple

from mla_portable import deep_gemm
from mla_portable.choose import get_registry
from mla_portable.engines.sglang import settings, stock

TORCH_FUNCTIONS: Final = "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH"
"""SGLang's own variable: functions in plain torch take DeepGEMM's place."""

OURS: Final = {
    "resolve_paged_mqa_logits_metadata_fn": deep_gemm.get_paged_mqa_logits_metadata,
    "resolve_fp8_paged_mqa_logits_fn": deep_gemm.fp8_paged_mqa_logits,
    "resolve_fp8_mqa_logits_fn": deep_gemm.fp8_mqa_logits,
}
"""What a selector returns here; `resolve_num_sms` returns a number."""


class IndexerChoice(NamedTuple):
    """ours: DeepGEMM is not called. reason: in words."""

    ours: bool
    reason: str


@functools.cache
def choice() -> IndexerChoice:
    """The choice for this process's device; made when SGLang first asks, and logged."""
    mode = settings.indexer()
    found = _decide(mode)
    who = "mla_portable" if found.ours else "SGLang"
    settings.logger.info("the DSA indexer's keys are scored by %s's functions because %s", who, found.reason)
    return found


def _decide(mode: str) -> IndexerChoice:
    if mode == "off":
        return IndexerChoice(False, f"{settings.ENV_INDEXER}=off")
    if mode == "on":
        return IndexerChoice(True, f"{settings.ENV_INDEXER}=on")
    if os.environ.get(TORCH_FUNCTIONS, "").strip().lower() in ("1", "true", "yes", "y"):
        return IndexerChoice(False, f"{TORCH_FUNCTIONS} is set")
    registry = get_registry()
    facts = registry.facts(registry.default_device())
    missing = stock.against_deep_gemm(facts)
    return IndexerChoice(missing is not None, missing or f"DeepGEMM serves {facts.arch}")


def select(name: str, original: Any) -> Any:
    """What the selector `name` returns. original: SGLang's."""
    if not choice().ours:
        return original()
    return deep_gemm.get_num_sms() if name == "resolve_num_sms" else OURS[name]


def module(original: Callable[[], Any]) -> Any:
    """What has DeepGEMM's functions. original: gives DeepGEMM's own module."""
    return deep_gemm if choice().ours else original()


class LateDeepGemm:
    """Stands for the module `deep_gemm` in a module of SGLang; whose functions it has is decided when one is asked for."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs

    def __getattr__(self, name: str) -> Any:
        return getattr(deep_gemm if choice().ours and name in deep_gemm.__all__ else self._theirs, name)


def replace_modules(names: tuple[str, ...]) -> None:
    """Let these modules of SGLang call DeepGEMM through a LateDeepGemm; calling it again changes nothing."""
    for name in names:
        module: Any = import_module(name)
        theirs = getattr(module, "deep_gemm", None)
        if not isinstance(theirs, LateDeepGemm):
            module.deep_gemm = LateDeepGemm(theirs)
