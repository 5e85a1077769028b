# SPDX-License-Identifier: Apache-2.0
"""No benchmark is slower than its record on the same device."""

from __future__ import annotations

from gate import CAPABILITY, finish

from mla_portable.tools.matrix import read_records
from mla_portable.tools.matrix.gates import regressions

finish("regressions", regressions(read_records(CAPABILITY).evidence))
