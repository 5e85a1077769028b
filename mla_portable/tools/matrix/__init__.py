# SPDX-License-Identifier: Apache-2.0
"""The capability matrix: which primitive runs on which device through which implementation, and how far that is proven.

profiles  device facts with sources        claims    what is declared, as plain data; collect takes it from the registry
evidence  what was run, with its schema    hashes    binds evidence to sources; record makes it
levels    claims + evidence + hashes -> cells, a pure function; table arranges them; render and svg draw them
gates     what continuous integration refuses

Reading and drawing load neither torch nor a plugin: those are `collect`, `record` and the gates that run something.
"""

from mla_portable.tools.matrix.errors import RecordError
from mla_portable.tools.matrix.levels import LEVELS, Cell, evaluate
from mla_portable.tools.matrix.records import Records, find_records, read_records
from mla_portable.tools.matrix.table import Table, make_table

__all__ = ["LEVELS", "Cell", "RecordError", "Records", "Table", "evaluate", "find_records", "make_table", "read_records"]
