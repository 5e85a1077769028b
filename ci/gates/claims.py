# SPDX-License-Identifier: Apache-2.0
"""No claim reaches beyond its evidence, and no evidence has a failure."""

from __future__ import annotations

from gate import finish, live_records

from mla_portable.tools.matrix.gates import claims_within_evidence

records = live_records()
finish("claims", claims_within_evidence(records.cells(), records.declarations.claims, records.profiles))
