# SPDX-License-Identifier: Apache-2.0
"""Print the jobs for self-hosted GPU runners as JSON: one per (vendor, device) of capability/profiles that something claims.

    python ci/gpu_cells.py [DEVICE,DEVICE,...]

An argument names the profiles that have a runner (the repository variable GPU_DEVICES); without it every profile is listed.
A runner carries the labels self-hosted, its vendor and its profile. The backends of a job are what the declarations send there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mla_portable.tools.matrix.claims import load_declarations
from mla_portable.tools.matrix.profiles import load_profiles

CAPABILITY = Path(__file__).parents[1] / "capability"


def cells(available: list[str] | None) -> list[dict[str, str]]:
    """Raises: SystemExit for a name that no profile carries."""
    profiles = load_profiles(CAPABILITY / "profiles")
    unknown = [name for name in available or () if name not in profiles]
    if unknown:
        raise SystemExit(f"no such profile: {', '.join(unknown)}; expected {', '.join(profiles)}")
    claims = load_declarations(CAPABILITY / "declarations.json").claims
    found: list[dict[str, str]] = []
    for slug, profile in profiles.items():
        backends = dict.fromkeys(c.implementation.partition(".")[0] for c in claims if c.devices.get(slug) == ())
        if profile.device_type != "cpu" and backends and (available is None or slug in available):
            found.append({"vendor": profile.vendor, "device": slug, "backends": " ".join(backends)})
    return found


if __name__ == "__main__":
    given = [name.strip() for name in sys.argv[1].split(",") if name.strip()] if len(sys.argv) > 1 else None
    print(json.dumps(cells(given)))
