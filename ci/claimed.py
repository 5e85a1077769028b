# SPDX-License-Identifier: Apache-2.0
"""Print what the plugins claim, for scripts that run it.

    python ci/claimed.py native          backends that claim a CPU and run there as they are: the core's own
    python ci/claimed.py interpreted     those of everybody else that claim one
    python ci/claimed.py gpu [DEVICE,..] jobs for self-hosted GPU runners as JSON, one for each device that something claims

`gpu` takes the profiles that have a runner (the repository variable GPU_DEVICES); without it every profile is listed. A runner
carries the labels self-hosted, its vendor and its profile.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mla_portable.registry import Registry
from mla_portable.tools.matrix.claims import collect_declarations
from mla_portable.tools.matrix.records import read_profiles

PROFILES = read_profiles(Path(__file__).parents[1] / "capability")
CLAIMS = collect_declarations(Registry(environ={}, probe=False), PROFILES).claims


def on_cpu(kind: str) -> list[str]:
    wanted = [claim for claim in CLAIMS if not claim.devices["cpu"] and claim.core == (kind == "native")]
    return list(dict.fromkeys(claim.backend for claim in wanted))


def gpu_jobs(available: list[str]) -> list[dict[str, str]]:
    """Raises: SystemExit for a name that no profile carries."""
    unknown = [name for name in available if name not in PROFILES]
    if unknown:
        raise SystemExit(f"no such profile: {', '.join(unknown)}; expected {', '.join(PROFILES)}")
    found: list[dict[str, str]] = []
    for slug in available:
        backends = dict.fromkeys(claim.backend for claim in CLAIMS if not claim.devices[slug])
        if PROFILES[slug].device_type != "cpu" and backends:
            found.append({"vendor": PROFILES[slug].vendor, "device": slug, "backends": " ".join(backends)})
    return found


if __name__ == "__main__":
    kind, *given = sys.argv[1:]
    if kind == "gpu":
        print(json.dumps(gpu_jobs([each.strip() for each in given[0].split(",") if each.strip()] if given else list(PROFILES))))
    else:
        print("\n".join(on_cpu(kind)))
