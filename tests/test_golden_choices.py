# SPDX-License-Identifier: Apache-2.0
"""What every device profile is served by is what is on record: `golden_choices.py`."""

from __future__ import annotations

import difflib

from golden_choices import RECORD, lines


def test_every_device_is_served_as_on_record():
    """Run `python tests/golden_choices.py` after a change that was meant, and read what it changes."""
    changed = list(difflib.unified_diff(RECORD.read_text().splitlines(), list(lines()), "record", "now", lineterm="", n=0))
    assert not changed, "\n".join(changed[:40])
