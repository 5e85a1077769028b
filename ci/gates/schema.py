# SPDX-License-Identifier: Apache-2.0
"""Every profile, declaration and line of evidence can be believed, and evidence of the base is still there.

python ci/gates/schema.py [BASE]      BASE: a git reference, default origin/main, else main
"""

from __future__ import annotations

from gate import CAPABILITY, base_commit, base_files, finish

from mla_portable.tools.matrix import RecordError, read_records
from mla_portable.tools.matrix.gates import append_only

try:
    records = read_records(CAPABILITY)
except RecordError as error:
    finish("schema", [str(error)])
now = {
    path.relative_to(CAPABILITY.parent).as_posix(): path.read_text(encoding="utf-8")
    for path in (CAPABILITY / "evidence").rglob("*.jsonl")
}
finish("schema", append_only(base_files("capability/evidence", base_commit()), now))
