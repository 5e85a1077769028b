# SPDX-License-Identifier: Apache-2.0
"""examples/kernel.py: the page quotes it, and a kernel that is wrong is found. tests/test_pages.py runs it as it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples/kernel.py"


def test_the_page_quotes_the_example_word_for_word() -> None:
    quoted = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/adding-a-kernel.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(quoted) >= 5
    for body in quoted:
        assert body in EXAMPLE.read_text(), f"not in the example:\n{body}"


def test_a_kernel_that_reads_empty_parts_is_refused_by_the_probe_and_by_the_suite(tmp_path: Path) -> None:
    """What an empty part holds may be NaN."""
    text = EXAMPLE.read_text()
    mask = 'if tl.abs(lse) < float("inf"):'
    assert mask in text
    changed = tmp_path / "kernel.py"
    changed.write_text(text.replace(mask, "if True:"))
    done = subprocess.run([sys.executable, str(changed)], env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "nothing can run it" in done.stdout and "probe" in done.stdout
    assert re.search(r"^failed merge_states\[mine\.rows-\S*dead", done.stdout, re.MULTILINE)
