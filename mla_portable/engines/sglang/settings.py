# SPDX-License-Identifier: Apache-2.0
"""What users set: environment variables, read when they are needed. `registration` declares them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from mla_portable.choose.settings import read
from mla_portable.contracts import Variable

logger = logging.getLogger("sglang.mla_portable")
"""Below SGLang's own loggers, so that what the plugin says is seen where SGLang's lines are."""

ENV_MODE: Final = "MLA_PORTABLE_SGLANG"
ENV_INDEXER: Final = "MLA_PORTABLE_SGLANG_INDEXER"
ENV_HISPARSE: Final = "MLA_PORTABLE_SGLANG_HISPARSE"
VARIABLES: Final = {
    **{name: Variable.choice(name, "auto", "on", "off") for name in (ENV_MODE, ENV_INDEXER)},
    ENV_HISPARSE: Variable.choice(ENV_HISPARSE, "on", "off"),
}
"""By name."""


def check(environ: Mapping[str, str] | None = None) -> None:
    """Raise InvalidArgument unless every variable of the plugin has an allowed value."""
    for variable in VARIABLES.values():
        read(variable, environ)


def mode(environ: Mapping[str, str] | None = None) -> str:
    """Whose attention serves: "on" for this one, "off" for SGLang's, "auto" for this one where SGLang's cannot run."""
    return read(VARIABLES[ENV_MODE], environ).lower() or "auto"


def indexer(environ: Mapping[str, str] | None = None) -> str:
    """Whose functions score the indexer's keys: "on": these, "off": SGLang's, "auto": these where DeepGEMM cannot run."""
    return read(VARIABLES[ENV_INDEXER], environ).lower() or "auto"


def hisparse(environ: Mapping[str, str] | None = None) -> bool:
    """Attention over a KV cache in host memory (HiSparse) is served here; it is experimental."""
    return read(VARIABLES[ENV_HISPARSE], environ).lower() == "on"
