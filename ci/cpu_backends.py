# SPDX-License-Identifier: Apache-2.0
"""Print the backends that claim a CPU: `native`, the core's own, or `interpreted`, everybody else's."""

from __future__ import annotations

import sys
from pathlib import Path

from mla_portable.tools.matrix.claims import load_declarations

CAPABILITY = Path(__file__).parents[1] / "capability"


def backends(kind: str) -> list[str]:
    claims = load_declarations(CAPABILITY / "declarations.json").claims
    wanted = [claim for claim in claims if not claim.devices["cpu"] and claim.core == (kind == "native")]
    return list(dict.fromkeys(claim.implementation.partition(".")[0] for claim in wanted))


if __name__ == "__main__":
    print("\n".join(backends(sys.argv[1])))
