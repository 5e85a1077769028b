# SPDX-License-Identifier: Apache-2.0
"""Reports as tests make them, and the records that follow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mla_portable.tools.matrix.derive import records_of
from mla_portable.tools.matrix.profiles import Profile, load_profiles
from mla_portable.tools.matrix.reports import digest, parse_report, report_text
from mla_portable.tools.provenance import Provenance

ROOT = Path(__file__).parents[1]
PROFILES = load_profiles(ROOT / "capability" / "profiles")
RUN = Provenance("2026-11-01T00:00:00Z", "pytest", "0123456789abcdef", "0" * 40, {})


def derived(document: Mapping[str, Any], profiles: Mapping[str, Profile] = PROFILES) -> list[dict[str, Any]]:
    """The records of a report, as they are when it has been written and read."""
    text = report_text(document)
    return records_of(parse_report(json.loads(text), "a test's report"), digest(text), profiles)
