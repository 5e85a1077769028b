# SPDX-License-Identifier: Apache-2.0
"""The site's pages: every page is in the navigation, and a link leads to where it does in the repository. ci/site builds it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

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
