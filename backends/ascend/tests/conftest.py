# SPDX-License-Identifier: Apache-2.0
"""The helpers and the automatic fixtures of the project's own tests."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

TESTS = Path(__file__).parents[3] / "tests"
sys.path.append(str(TESTS))
_spec = spec_from_file_location("tests_conftest", TESTS / "conftest.py")
_shared = module_from_spec(_spec)
_spec.loader.exec_module(_shared)
nothing_is_left_changed = _shared.nothing_is_left_changed
fresh_accelerators = _shared.fresh_accelerators
fresh_draws = _shared.fresh_draws
