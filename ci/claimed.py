# SPDX-License-Identifier: Apache-2.0
"""Print the jobs for self-hosted GPU runners as JSON, one for each device that an implementation declares.

    python ci/claimed.py [DEVICE,..]

The devices are the profiles that have a runner (the repository variable GPU_DEVICES); without any every profile is listed. A
runner carries the labels self-hosted, its vendor and its profile.
"""

from __future__ import annotations

import json
import sys

from mla_portable.capability.profiles import all_profiles
from mla_portable.choose import Registry


def gpu_jobs(available: list[str]) -> list[dict[str, str]]:
    """Raises: SystemExit for a name that no profile carries."""
    profiles, offered = all_profiles(), Registry(environ={}, probe=False).implementations()
    unknown = [name for name in available if name not in profiles]
    if unknown:
        raise SystemExit(f"no such profile: {', '.join(unknown)}; expected {', '.join(profiles)}")
    found: list[dict[str, str]] = []
    for slug in available or profiles:
        facts = profiles[slug].device_facts()
        backends = dict.fromkeys(each.backend for each in offered if not [*each.support.device_reasons(facts)])
        if facts.device_type != "cpu" and backends:
            found.append({"vendor": facts.vendor, "device": slug, "backends": " ".join(backends)})
    return found


if __name__ == "__main__":
    print(json.dumps(gpu_jobs([each.strip() for each in ",".join(sys.argv[1:]).split(",") if each.strip()])))
