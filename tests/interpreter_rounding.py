# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter rounds ties of conversions away from zero; a GPU and torch round them to even."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl

__all__ = ["round_ties_to_even"]


def round_ties_to_even(patches: pytest.MonkeyPatch) -> None:
    """Let the interpreter convert float32 to e4m3 and to bfloat16 as torch does."""
    from triton.runtime import interpreter

    narrow = {
        tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8, np.uint8),
        tl.bfloat16: (torch.bfloat16, torch.int16, np.uint16),
    }
    convert = interpreter._convert_float

    def rounded(values: Any, given: Any, wanted: Any, mode: Any) -> Any:
        if given != tl.float32 or wanted not in narrow:
            return convert(values, given, wanted, mode)
        kind, integer, bits = narrow[wanted]
        return torch.from_numpy(np.ascontiguousarray(values)).to(kind).view(integer).numpy().view(bits).reshape(values.shape)

    patches.setattr(interpreter, "_convert_float", rounded)
