# SPDX-License-Identifier: Apache-2.0
"""Where times come from that a benchmark takes here and now."""

from __future__ import annotations

from datetime import datetime, timezone

from mla_portable._version import __version__
from mla_portable.contracts import DeviceFacts
from mla_portable.times.records import Measurement


def measured_here(facts: DeviceFacts) -> Measurement:
    """For records of a device under the name that its driver reports, today, with the libraries that are installed."""
    today = datetime.now(timezone.utc).date().isoformat()
    return Measurement(facts.name, (facts.name,), today, __version__, tuple(sorted(dict(facts.libraries).items())))
