# SPDX-License-Identifier: Apache-2.0
"""The capability matrix: which primitive runs on which device through which implementation, and how far that is proven.

profiles  device facts with sources        claims    what the installed plugins declare, as plain data
evidence  what was run, with its schema    record    makes it; fold removes what later records supersede
levels    claims + evidence + hashes -> cells, a pure function; table arranges them; render draws them
gates     what continuous integration refuses
"""

from mla_portable.tools.matrix.model import RecordError
from mla_portable.tools.matrix.records import Records, find_records, read_profiles, read_records
from mla_portable.tools.matrix.table import make_table

__all__ = ["RecordError", "Records", "find_records", "make_table", "read_profiles", "read_records"]
