# SPDX-License-Identifier: Apache-2.0
"""What is declared, the conformance suite has cases for: it is collected for every device, not run."""

from __future__ import annotations

from gate import finish, live_records

from mla_portable.registry import get_registry
from mla_portable.tools.matrix.collect import suite_cases
from mla_portable.tools.matrix.gates import untested_claims

records = live_records()
finish("untested", untested_claims(records.declarations.claims, records.profiles, suite_cases(get_registry())))
