# SPDX-License-Identifier: Apache-2.0
"""What the project's own tests have: one thread, and the helpers of its tests folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
sys.path.append(str(Path(__file__).parents[3] / "tests"))
