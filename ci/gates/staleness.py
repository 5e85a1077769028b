# SPDX-License-Identifier: Apache-2.0
"""Evidence that any machine can renew belongs to the sources as they are."""

from __future__ import annotations

from gate import finish, live_records

from mla_portable.tools.matrix.gates import staleness

records = live_records()
finish("staleness", staleness(records.cells(), records.profiles))
