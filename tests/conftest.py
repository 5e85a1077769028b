# SPDX-License-Identifier: Apache-2.0
"""What every test needs: on a machine without a GPU, Triton's kernels run in its interpreter.

Triton decides that when a kernel is decorated, so the variable must be set before anything imports triton.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
