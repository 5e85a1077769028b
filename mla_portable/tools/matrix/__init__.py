# SPDX-License-Identifier: Apache-2.0
"""The capability matrix: which primitive runs on which device through which implementation, and how far that is proven.

profiles  device facts with sources        claims    what the installed plugins declare, as plain data
evidence  what was run, with its schema    record    makes it; fold removes what later records supersede
levels    claims + evidence + hashes -> cells, a pure function; arrange makes a table of them; render and terminal draw it
table     the table, as matrix.json holds it: what is shown where nothing changed, without loading torch or a plugin
gates     what continuous integration refuses
"""
