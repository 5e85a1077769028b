# SPDX-License-Identifier: Apache-2.0
"""Whose functions score an indexer's keys on a device: DeepGEMM's, or this project's."""

from __future__ import annotations

from typing import Final

from mla_portable.contracts import DeviceFacts

DEEP_GEMM_ARCHS: Final = ("sm90", "sm10", "sm12")
"""What engines say of DeepGEMM: it serves Hopper, and both families of Blackwell."""


def deep_gemm_serves(facts: DeviceFacts) -> bool:
    """Engines use DeepGEMM there, where it can be imported."""
    return facts.vendor == "nvidia" and facts.arch.startswith(DEEP_GEMM_ARCHS)


def own_indexer(facts: DeviceFacts) -> str | None:
    """What vLLM's indexer runs on there, in words; None where it lacks DeepGEMM, so that the plugin serves it by default."""
    if deep_gemm_serves(facts):
        return "DeepGEMM"
    return "no DeepGEMM on ROCm" if facts.vendor == "amd" else None


def scorer(facts: DeviceFacts, *, ours: str, theirs: str, asked: str) -> str:
    """Who scores the indexer's keys, in words.

    Args:
        ours, theirs: how an engine's plugin calls this project's functions, and the engine's own with DeepGEMM. asked: the
            setting that asks for ours on every device, "" where DeepGEMM comes first.
    """
    if facts.device_type == "cpu":
        return "not known on a CPU; ask on the device that serves"
    if asked:
        return f"{ours}: {asked}"
    if deep_gemm_serves(facts):
        return f"{theirs} for {facts.arch}; where that cannot be imported, {ours}"
    return f"{ours}: DeepGEMM does not support {facts.arch}"
