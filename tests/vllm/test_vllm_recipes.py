# SPDX-License-Identifier: Apache-2.0
"""The recipes of docs/deploy.md use options, parsers and a tokenizer mode that the installed vLLM has."""

from __future__ import annotations

import re
from pathlib import Path

import vllm
from recipes import recipes, unknown_options, values

COMMANDS = recipes("vllm serve ")
VLLM = Path(vllm.__file__).parent


def test_every_option_exists() -> None:
    sources = [VLLM / "engine/arg_utils.py", *(VLLM / "entrypoints").rglob("*.py"), *(VLLM / "config").glob("*.py")]
    assert len(COMMANDS) >= 8 and not unknown_options(COMMANDS, sources, least=12)


def test_every_parser_and_tokenizer_mode_exists() -> None:
    for option, path in (
        ("tool-call-parser", "tool_parsers/__init__.py"),
        ("reasoning-parser", "reasoning/__init__.py"),
        ("tokenizer-mode", "tokenizers/registry.py"),
    ):
        named = values(COMMANDS, option)
        known = set(re.findall(r'^ +"(\w+)": \(', (VLLM / path).read_text(), re.MULTILINE))
        assert named and named <= known, option
