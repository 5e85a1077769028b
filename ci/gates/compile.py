# SPDX-License-Identifier: Apache-2.0
"""Every compiled record is of today's sources, and a spot check agrees: one architecture a day is compiled again.

    python ci/gates/compile.py [ARCH ...]      instead of the day's

`ci/compile` compiles everything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime, timezone

from gate import ROOT, finish, live_records

from mla_portable.tools.matrix.collect import COMPILER
from mla_portable.tools.matrix.gates import compiled_as_recorded
from mla_portable.tools.matrix.record import compiled_records, origin_of

records = live_records()
declared = records.declarations
problems: list[str] = []
for module in dict.fromkeys(claim.module for claim in declared.claims if claim.targets):
    targets = next(claim.targets for claim in declared.claims if claim.module == module and claim.targets)
    chosen = [arch for arch in sys.argv[1:] if arch in targets]
    if not sys.argv[1:]:
        chosen = [targets[datetime.now(timezone.utc).toordinal() % len(targets)]]
    elif not chosen:
        continue
    command = [sys.executable, "-m", f"{module}.{COMPILER}", "--json", "--quick", *chosen]
    run = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "0"}, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT
    )
    if run.returncode not in (0, 1):
        problems.append(f"{' '.join(command)}: exit status {run.returncode}")
        continue
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    fresh = compiled_records(lines, module, declared, records.profiles, origin_of(ROOT, " ".join(command)))
    recorded = [each.data for each in records.evidence if each.kind == "compiled"]
    problems += compiled_as_recorded(recorded, fresh)
    print(f"compiled again: {len(lines)} variants of {module} for {', '.join(chosen)}")
finish("compile", problems)
