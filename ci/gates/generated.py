# SPDX-License-Identifier: Apache-2.0
"""declarations.json, MATRIX.md and matrix.svg are what registry and records say."""

from __future__ import annotations

from gate import CAPABILITY, finish

from mla_portable.tools.matrix.generated import differences, generate

finish("generated", differences(generate(CAPABILITY)))
