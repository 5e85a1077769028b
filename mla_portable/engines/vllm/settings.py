# SPDX-License-Identifier: Apache-2.0
"""What users set: environment variables, read when they are needed, and `mla_portable` in vLLM's `additional_config`.

`registration` declares them. One that is set goes before the configuration's entry.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from mla_portable.choose.settings import check_value, read
from mla_portable.contracts import ROUTES, InvalidArgument, Variable
from mla_portable.layouts import SCALE_FORMATS

logger = logging.getLogger("vllm.mla_portable")
"""Below vLLM's own logger, so that what the plugin says is seen where vLLM's lines are."""

ENV_MODE: Final = "MLA_PORTABLE_VLLM"
ENV_INDEXER: Final = "MLA_PORTABLE_VLLM_INDEXER"
ENV_LAYER: Final = "MLA_PORTABLE_VLLM_LAYER"
ENV_ROUTE: Final = "MLA_PORTABLE_VLLM_ROUTE"
ENV_SCALES: Final = "MLA_PORTABLE_VLLM_CACHE_SCALES"
ENV_WRITER: Final = "MLA_PORTABLE_VLLM_CACHE_WRITER"
INDEXER_IN_TIMES: Final = "vllm.indexer"
"""DeepGEMM's scores, then vLLM's top-k: their name in files of times."""
VARIABLES: Final = {
    each.name: each
    for each in (
        Variable.choice(ENV_MODE, "auto", "custom", "override", "off"),
        Variable.choice(ENV_INDEXER, "auto", "on", "off"),
        Variable.choice(ENV_LAYER, "auto", "on", "off"),
        Variable.choice(ENV_WRITER, "auto", "vllm", "mla_portable"),
        Variable.choice(ENV_SCALES, "auto", *SCALE_FORMATS, "mixed"),
        Variable.choice(ENV_ROUTE, "auto", *ROUTES),
    )
}
"""By name."""

IN_CONFIG: Final = {
    "route": ENV_ROUTE,
    "cache_writer": ENV_WRITER,
    "cache_scales": ENV_SCALES,
    "indexer": ENV_INDEXER,
    "layer": ENV_LAYER,
}
"""Keys of `additional_config["mla_portable"]` -> the variable of the same meaning. The mode is needed before there is one."""

_from_config: dict[str, str] = {}
"""By variable; of the configuration that was adopted last."""


def _read(name: str, environ: Mapping[str, str] | None = None) -> str:
    """The value, "" where it is not set. Raises: InvalidArgument for one that is not allowed."""
    return read(VARIABLES[name], environ) or _from_config.get(name, "")


def adopt(additional_config: object) -> None:
    """Take the values in `additional_config["mla_portable"]`, and none of an earlier configuration.

    Raises: InvalidArgument for a key that is not in IN_CONFIG, and for a value that is not allowed.
    """
    given = additional_config.get("mla_portable", {}) if isinstance(additional_config, Mapping) else {}
    where, keys = "vLLM", ", ".join(IN_CONFIG)
    if not isinstance(given, Mapping):
        raise InvalidArgument(where, "additional_config['mla_portable']", got=repr(given), expected=f"a mapping with {keys}")
    if unknown := given.keys() - IN_CONFIG.keys():
        remedy = f"{ENV_MODE} is read before there is a configuration." if "mode" in unknown else ""
        got = ", ".join(sorted(map(repr, unknown)))
        raise InvalidArgument(where, "additional_config['mla_portable']", got=got, expected=f"keys among {keys}", remedy=remedy)
    values = {IN_CONFIG[key]: str(value) for key, value in given.items()}
    for name, value in values.items():
        check_value(VARIABLES[name], value.strip())
    _from_config.clear()
    _from_config.update(values)


def check(environ: Mapping[str, str] | None = None) -> None:
    """Raise InvalidArgument unless every variable of the plugin has an allowed value."""
    for name in VARIABLES:
        _read(name, environ)


def mode(environ: Mapping[str, str] | None = None) -> str:
    """What the plugin registers: auto, custom, override or off; see `plugin.register`."""
    return _read(ENV_MODE, environ).lower() or "auto"


def indexer(environ: Mapping[str, str] | None = None) -> str:
    """Whose indexer serves: "on" for this one, "off" for vLLM's, "auto" for this one where DeepGEMM cannot run."""
    return _read(ENV_INDEXER, environ).lower() or "auto"


def layer(environ: Mapping[str, str] | None = None) -> str:
    """Whose layer stands around attention: "on" for this one where it can, "off" for vLLM's, "auto" for the faster one."""
    return _read(ENV_LAYER, environ).lower() or "auto"


def cache_writer() -> str:
    """Who writes the cache: "vllm", "mla_portable", or "auto" for vLLM's own operator where it works."""
    return _read(ENV_WRITER).lower() or "auto"


def scale_format() -> str | None:
    """The format of every scale in the FP8 cache as the user states it, "mixed" for several, None where it is inferred."""
    value = _read(ENV_SCALES).lower()
    return None if value in ("", "auto") else value


def route(environ: Mapping[str, str] | None = None) -> str:
    """ "auto" or one of `mla_portable.contracts.ROUTES`, forced for every layer."""
    return _read(ENV_ROUTE, environ).lower() or "auto"
