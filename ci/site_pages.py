# SPDX-License-Identifier: Apache-2.0
"""A hook of mkdocs: pages that are kept outside of docs/, and links that leave the site.

README.md is the first page. A link to a file of the repository that is no page becomes one to the repository (`repo_url`), or
plain text where that is not known.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "capability/MATRIX.md": "capability/MATRIX.md",
    "capability/FEATURES.md": "capability/FEATURES.md",
}
"""Path in the repository -> path on the site."""

_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def place_of(path: str) -> str | None:
    """Where a file of the repository is on the site, None where it is not on it."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    return path.removeprefix("docs/") if path.startswith("docs/") and path.endswith((".md", ".svg")) else None


def for_the_site(text: str, path: str, repository: str) -> str:
    """The text of a page whose links lead to where they do in the repository. path: of the page, in the repository."""
    own = place_of(path)
    assert own is not None, path

    def link(match: re.Match[str]) -> str:
        words, target = match.groups()
        name, mark, anchor = target.partition("#")
        if not name or re.match(r"[a-z]+://", target):
            return match.group()
        whole = posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
        place = place_of(whole)
        if place is not None:
            return f"[{words}]({posixpath.relpath(place, posixpath.dirname(own) or '.')}{mark}{anchor})"
        return f"[{words}]({repository.rstrip('/')}/blob/main/{whole})" if repository else words

    parts: list[str] = []
    at = 0
    for code in _CODE.finditer(text):
        parts += [_LINK.sub(link, text[at : code.start()]), code.group()]
        at = code.end()
    return "".join([*parts, _LINK.sub(link, text[at:])])


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from outside of docs/."""
    from mkdocs.structure.files import File

    for path, place in OUTSIDE.items():
        files.append(File.generated(config, place, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links of the repository into links of the site."""
    places = {place: path for path, place in OUTSIDE.items()}
    own = page.file.src_uri
    return for_the_site(markdown, places.get(own, f"docs/{own}"), config.repo_url or "")


def unconverted(output: str) -> list[str]:
    """Names of the sections of docstrings that stand in a page as they are written, not as ci/site_docstrings.py makes them."""
    return re.findall(r"^(?:<p>)?(Args|Attributes|Returns|Raises):", output, re.MULTILINE)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Refuse a page of the reference whose docstrings nobody converted."""
    from mkdocs.exceptions import PluginError

    found = unconverted(output) if page.file.src_uri.startswith("reference/") else []
    if found:
        raise PluginError(f"{page.file.src_uri}: {len(found)} sections of docstrings, {found[0]} first, are no Markdown")
    return output
