# SPDX-License-Identifier: Apache-2.0
"""The recipes of docs/deploy.md use options, parsers and a tokenizer mode that the installed vLLM has."""

from __future__ import annotations

import re
from pathlib import Path

import vllm

PAGE = (Path(__file__).parents[2] / "docs/deploy.md").read_text()
COMMANDS = [line.partition("vllm serve ")[2].strip() for line in PAGE.splitlines() if "vllm serve " in line and "`" not in line]
VLLM = Path(vllm.__file__).parent


def values(option: str) -> set[str]:
    return {found for command in COMMANDS for found in re.findall(rf"--{option} (\S+)", command)}


def test_every_option_exists() -> None:
    sources = [VLLM / "engine/arg_utils.py", *(VLLM / "entrypoints").rglob("*.py"), *(VLLM / "config").glob("*.py")]
    text = "\n".join(path.read_text() for path in sources)
    options = {found for command in COMMANDS for found in re.findall(r"--([a-z-]+)", command)}
    assert len(COMMANDS) >= 8 and len(options) >= 12
    assert not {each for each in options if f"--{each}" not in text and each.replace("-", "_") not in text}


def test_every_parser_and_tokenizer_mode_exists() -> None:
    for option, path in (
        ("tool-call-parser", "tool_parsers/__init__.py"),
        ("reasoning-parser", "reasoning/__init__.py"),
        ("tokenizer-mode", "tokenizers/registry.py"),
    ):
        known = set(re.findall(r'^ +"(\w+)": \(', (VLLM / path).read_text(), re.MULTILINE))
        assert values(option) and values(option) <= known, option
