# SPDX-License-Identifier: Apache-2.0
"""Forward only: `register()` gives Hugging Face transformers `attn_implementation="mla_portable"` for models with an indexer.

See docs/transformers.md. transformers is imported when `register` is called, and not before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, Final

__all__ = ["register"]

_OLDEST: Final = (5, 18)
"""The first whose layers cache latents and pass `indices` to attention functions."""
_WHERE: Final = "mla_portable.transformers.register"


def register() -> None:
    """Register the attention function, and its mask, under the name "mla_portable". May be called again.

    `expand_kv` of the served classes then returns latents where a model's `attn_implementation` is "mla_portable", so that
    nothing is expanded; models with another one are as before.

    Raises: ImportError where transformers is missing, or older than 5.18, or its classes have no `expand_kv`.
    """
    needed = f"{_WHERE} needs transformers {_OLDEST[0]}.{_OLDEST[1]} or later, the first to pass `indices` with cached latents"
    try:
        transformers = import_module("transformers")
    except ModuleNotFoundError as error:
        raise ImportError(f"{needed}: it is not installed. Run: pip install 'transformers>=5.18'") from error
    version = str(transformers.__version__)
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise ImportError(f"{needed}: {version} is installed. Run: pip install --upgrade transformers")
    from mla_portable.engines.transformers.attention import NAME, SERVED, mla_portable_attention

    classes = [getattr(import_module(module), name) for module, name in SERVED]
    for cls in classes:
        if not hasattr(cls, "expand_kv"):
            raise ImportError(f"{_WHERE}: {cls.__name__} of transformers {version} has no expand_kv, which 5.18 to 5.24 have.")
    for cls in classes:
        if not hasattr(cls.expand_kv, "expands"):
            cls.expand_kv = _latents_where_asked(cls.expand_kv, NAME)
    transformers.AttentionInterface.register(NAME, mla_portable_attention)
    masks = import_module("transformers.masking_utils")
    masks.AttentionMaskInterface.register(NAME, masks.sdpa_mask)


def _latents_where_asked(expands: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`expand_kv` of a class, which returns latents for models whose `attn_implementation` is `name`."""
    from mla_portable.engines.transformers.latents import latent_rows

    @wraps(expands)
    def expand_kv(self: Any, kv_nope: Any, k_rot: Any) -> tuple[Any, Any]:
        if self.config._attn_implementation == name:
            return latent_rows(kv_nope, k_rot), kv_nope
        return expands(self, kv_nope, k_rot)

    vars(expand_kv)["expands"] = expands
    return expand_kv
