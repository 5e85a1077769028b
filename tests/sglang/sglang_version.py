# SPDX-License-Identifier: Apache-2.0
"""The SGLang that is tested, and how."""

from __future__ import annotations

import os
from importlib import metadata

try:
    VERSION = metadata.version("sglang")
except metadata.PackageNotFoundError:
    VERSION = None

SELECTORS = VERSION != "0.5.16"
"""It asks functions for DeepGEMM's."""
FUSED = os.environ.get("SGLANG_DSA_FUSE_TOPK", str(int(not SELECTORS))) == "1"
"""SGLang's own variable: top-k names slots; else positions in a request, which SGLang maps to slots. 0.5.16 does so only where
there are 2048 of them."""
