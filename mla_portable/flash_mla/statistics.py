# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's statistics of a row: its lse, which is +inf where no key is valid, and its greatest score.

No kernel of this project returns the greatest score of a row. It is the lse of scores that are `SHARPNESS` times as large,
over that factor: log(sum(exp(c * s))) / c lies between max(s) and max(s) + log(topk) / c. The factor is a power of two, so that
scores keep their digits. This costs a second attention, whose output is dropped, so it is only done on request:
`MLA_PORTABLE_FLASH_MLA_MAX_LOGITS=on`. Engines do not read it.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Final

from torch import Tensor

from mla_portable.choose.settings import read
from mla_portable.contracts import Variable

MAX_LOGITS: Final = Variable.choice("MLA_PORTABLE_FLASH_MLA_MAX_LOGITS", "on", "off")
LOG2_E: Final = math.log2(math.e)
SHARPNESS: Final = 2.0**20
"""With 2,048 equal keys the greatest score comes out 7.3e-6 too large; with one, as float32 rounds it."""


@cache
def wants_max_logits() -> bool:
    """Whether `MAX_LOGITS` asks for the greatest score; read once a process. Raises: InvalidArgument for another value."""
    return read(MAX_LOGITS).lower() == "on"


def as_flashmla(lse: Tensor) -> Tensor:
    """`lse`, in which a row without a valid key becomes +inf; changed in place, by a single kernel. NaN stays."""
    return lse.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=math.inf)
