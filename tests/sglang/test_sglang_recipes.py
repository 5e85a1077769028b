# SPDX-License-Identifier: Apache-2.0
"""The recipes of docs/deploy.md use options and parsers that the installed SGLang has."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs/deploy.md").read_text()
COMMANDS = [line.partition("sglang.launch_server ")[2].strip() for line in PAGE.splitlines() if "sglang.launch_server " in line]


def folder() -> Path:
    found = find_spec("sglang")
    assert found is not None and found.submodule_search_locations
    return Path(found.submodule_search_locations[0]) / "srt"


def test_every_option_exists() -> None:
    text = "\n".join(path.read_text() for path in [folder() / "server_args.py", *folder().glob("arg_groups/**/*.py")])
    options = {found for command in COMMANDS for found in re.findall(r"--([a-z-]+)", command)}
    assert len(COMMANDS) >= 4 and len(options) >= 9
    assert not {each for each in options if f"--{each}" not in text and each.replace("-", "_") not in text}


def test_every_parser_exists() -> None:
    for option, path in (
        ("tool-call-parser", "function_call/function_call_parser.py"),
        ("reasoning-parser", "parser/reasoning_parser.py"),
    ):
        named = {found for command in COMMANDS for found in re.findall(rf"--{option} (\S+)", command)}
        known = set(re.findall(r'^ +"([\w-]+)": \w+', (folder() / path).read_text(), re.MULTILINE))
        assert len(named) == 2 and named <= known, option
