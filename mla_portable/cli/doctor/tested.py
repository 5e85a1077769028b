# SPDX-License-Identifier: Apache-2.0
"""The versions of engines that were tested, and how; docs/vllm.md, docs/sglang.md and ci/ list the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Tested:
    """How a version of an engine was tested, each "" where it was not.

    Attributes:
        cpu: against the engine's real classes on a CPU. names: what of it was compared by names and parameters alone.
        gpu: on H200s.
    """

    version: str
    cpu: str = ""
    names: str = ""
    gpu: str = ""


TESTED: Final[Mapping[str, tuple[Tested, ...]]] = {
    "vLLM": (
        Tested(
            "0.17.1",
            cpu="attention; also with layers as Iluvatar's fork has them, and with stand-ins of that vendor's ops",
            names="attention",
        ),
        Tested("0.24.0", gpu="attention"),
        Tested("0.26.0", gpu="attention, the indexer"),
        Tested("0.28.0", cpu="all", names="all"),
        Tested(
            "0.30.0",
            cpu="DeepSeek-V4, GLM-5.3-Flash, hy_v4",
            names="all",
            gpu="attention and the indexer, without stock to compare with; GLM-5.3-Flash and hy_v4",
        ),
        Tested("0.33.0", cpu="all", names="all"),
    ),
    "SGLang": (
        Tested(
            "0.5.16",
            cpu="attention, the indexer's functions and its `Indexer`, rows of FP8 caches",
            gpu="offline engines with a small model",
        ),
        Tested(
            "0.5.23",
            cpu="attention, the indexer's functions and its `Indexer`, rows of FP8 caches",
            gpu="attention and the `Indexer`, without an engine",
        ),
    ),
}
"""By the engine's name, oldest version first."""


def how_tested(engine: str, version: str) -> str:
    """How this version was tested, or which ones were; "" for an engine that is not known, or without a version.

    Args:
        version: as the engine says it: a "v" before it and a local part such as "+cu129" do not make it another.
    """
    listed = TESTED.get(engine, ())
    if not listed or not version:
        return ""
    plain = version.removeprefix("v").partition("+")[0]
    found = next((each for each in listed if each.version == plain), None)
    if found is None:
        ways = {
            "on H200s": [each.version for each in listed if each.gpu],
            "on a CPU with its real classes": [each.version for each in listed if each.cpu],
        }
        return f"{engine} {plain} was not tested; tested " + "; ".join(f"{way}: {', '.join(n)}" for way, n in ways.items())
    ways = {"on H200s": found.gpu, "on a CPU with its real classes": found.cpu}
    return f"{engine} {plain} was tested: " + "; ".join(f"{way}: {what or 'nothing'}" for way, what in ways.items())
