# SPDX-License-Identifier: Apache-2.0
"""The recipes of docs/deploy.md use options and parsers that the installed SGLang has."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from recipes import recipes, unknown_options, values

COMMANDS = recipes("sglang.launch_server ")


def folder() -> Path:
    found = find_spec("sglang")
    assert found is not None and found.submodule_search_locations
    return Path(found.submodule_search_locations[0]) / "srt"


def test_every_option_exists() -> None:
    sources = [folder() / "server_args.py", *folder().glob("arg_groups/**/*.py")]
    assert len(COMMANDS) >= 4 and not unknown_options(COMMANDS, sources, least=9)


def test_every_parser_exists() -> None:
    for option, path in (
        ("tool-call-parser", "function_call/function_call_parser.py"),
        ("reasoning-parser", "parser/reasoning_parser.py"),
    ):
        named = values(COMMANDS, option)
        known = set(re.findall(r'^ +"([\w-]+)": \w+', (folder() / path).read_text(), re.MULTILINE))
        assert len(named) == 2 and named <= known, option
