# SPDX-License-Identifier: Apache-2.0
"""The site's pages: every page is in the navigation, and a link leads to where it does in the repository. ci/site builds it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("site_pages", ROOT / "ci/site_pages.py")
assert _spec is not None and _spec.loader is not None
site_pages = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(site_pages)

LINKS = [
    ("README.md", "[d](docs/deploy.md#fit)", "[d](deploy.md#fit)"),
    ("README.md", "[m](capability/MATRIX.md)", "[m](capability/MATRIX.md)"),
    ("README.md", "![p](docs/benchmarks-h200-decode.svg)", "![p](benchmarks-h200-decode.svg)"),
    ("README.md", "[l](LICENSE)", "[l](REPO/blob/main/LICENSE)"),
    ("capability/MATRIX.md", "[h](../docs/matrix.md)", "[h](../matrix.md)"),
    ("docs/dev/bench.md", "[r](evidence.md#a-run)", "[r](evidence.md#a-run)"),
    ("docs/dev/bench.md", "[c](../../mla_portable/x.py)", "[c](REPO/blob/main/mla_portable/x.py)"),
    ("docs/vllm.md", "[`code`](../README.md)", "[`code`](index.md)"),
    ("docs/vllm.md", "[a](#anchor) [w](https://example.org/x)", "[a](#anchor) [w](https://example.org/x)"),
    ("docs/api.md", "```\n[x](../LICENSE)\n```", "```\n[x](../LICENSE)\n```"),
]


@pytest.mark.parametrize(("page", "before", "after"), LINKS)
def test_a_link_leads_to_where_it_does_in_the_repository(page: str, before: str, after: str) -> None:
    assert site_pages.for_the_site(before, page, "REPO") == after


def test_without_a_repository_a_source_is_named() -> None:
    assert site_pages.for_the_site("see [`a.py`](../../a.py)", "docs/dev/bench.md", "") == "see `a.py`"


def test_every_page_is_in_the_navigation_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r": (\S+\.md)$", text[text.index("nav:") :], re.MULTILINE)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert len(listed) == len(set(listed))
    assert set(listed) == pages | set(site_pages.OUTSIDE.values())


BLOCK = re.compile(r"^::: (\S+)$((?:\n +.*)*)", re.MULTILINE)


def referenced() -> list[tuple[str, str]]:
    """(module, name) of everything that the pages of docs/reference describe."""
    found: list[tuple[str, str]] = []
    for page in sorted((ROOT / "docs/reference").glob("*.md")):
        for name, options in BLOCK.findall(page.read_text()):
            members = re.findall(r"^ +- (\w+)$", options, re.MULTILINE)
            found += [(name, each) for each in members] or ([] if "members: false" in options else [tuple(name.rsplit(".", 1))])
    return found


def test_the_reference_has_every_public_name() -> None:
    named = referenced()
    assert len(named) == len(set(named)) > 100
    for module, name in named:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
    public = {
        (module, name)
        for module in (
            *(
                "mla_portable",
                "mla_portable.attention",
                "mla_portable.planner",
                "mla_portable.contracts",
                "mla_portable.layouts",
            ),
            *("mla_portable.flash_mla", "mla_portable.deep_gemm", "mla_portable.transformers"),
        )
        for name in importlib.import_module(module).__all__
        if not name.startswith("_")
    }
    shown = {name for _, name in named}
    missing = {
        f"{module}.{name}"
        for module, name in public
        if name not in shown and not inspect.ismodule(getattr(importlib.import_module(module), name))
    }
    assert not missing, "not on a page of docs/reference"


@pytest.fixture
def as_markdown(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The function of ci/site_docstrings.py, which needs griffe for its class alone."""
    monkeypatch.setitem(sys.modules, "griffe", types.SimpleNamespace(Extension=object))  # type: ignore[arg-type]
    spec = importlib.util.spec_from_file_location("site_docstrings", ROOT / "ci/site_docstrings.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.as_markdown


def test_a_docstring_becomes_markdown(as_markdown: Any) -> None:
    text = """Attend.

Args:
    q: [B, H], rows. k, v: [N, 8],
        or none. scale: a factor.
    **rest: passed on.
Returns: out,
    of B rows.

A note: no entry.
"""
    assert as_markdown(text).splitlines() == [
        "Attend.",
        "",
        "",
        "**Args**:",
        "",
        "- `q`: [B, H], rows. `k, v`: [N, 8],",
        "    or none. `scale`: a factor.",
        "- `**rest`: passed on.",
        "",
        "**Returns**: out,",
        "    of B rows.",
        "",
        "A note: no entry.",
    ]


def test_no_docstring_of_the_reference_loses_words(as_markdown: Any) -> None:
    for module, name in referenced():
        text = inspect.getdoc(getattr(importlib.import_module(module), name)) or ""
        words = re.findall(r"\w+", text)
        assert re.findall(r"\w+", as_markdown(text)) == words, f"{module}.{name}"


def test_a_docstring_that_nobody_converted_is_found() -> None:
    assert site_pages.unconverted("<p>Attend.</p>\n<p>Args:\n    q: rows.\nRaises: InvalidArgument.</p>") == ["Args", "Raises"]
    assert site_pages.unconverted("<p>Attend.</p>\n<p><strong>Args</strong>:</p>") == []
