# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""The entry point of the group `vllm.general_plugins`: registers the path of the backend with vLLM.

vLLM calls it in every one of its processes, sometimes more than once. It only writes paths into a table: no backend is
imported, no device is touched.
"""

from __future__ import annotations

from typing import Any, Final

from mla_portable.engines.vllm import auto, indexer_seams, settings, warm_up
from mla_portable.engines.vllm.v4 import choice as v4_choice

BACKEND_PATH: Final = "mla_portable.engines.vllm.backend.MLAPortableBackend"
NAME: Final = "MLA_PORTABLE"


def register() -> None:
    """Register the backend as MLA_PORTABLE_VLLM says; calling it again changes nothing.

    As CUSTOM always, unless another plugin has that; as MLA_PORTABLE where vLLM takes new names (0.32 and later). In place
    of FLASHMLA_SPARSE with `override`, unless only the stock class serves the model; with `auto` where the stock class does
    not serve the device or the configuration. An override that another plugin made is left alone.
    Raises: InvalidArgument for a variable of the plugin with a value that is not allowed; nothing is registered then.
    """
    mode = settings.mode()
    if mode == "off":
        return
    settings.check()
    if settings.indexer() != "off":
        indexer_seams.install()
    v4_choice.install()
    warm_up.install()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    _claim(AttentionBackendEnum.CUSTOM, BACKEND_PATH)
    if hasattr(AttentionBackendEnum, "register"):
        if NAME in AttentionBackendEnum.__members__:
            _claim(AttentionBackendEnum[NAME], BACKEND_PATH)
        else:
            register_backend(NAME, BACKEND_PATH)
    if mode == "custom":
        return
    for place in auto.PLACES:
        if place not in AttentionBackendEnum.__members__:
            continue
        if mode == "auto":
            _claim(AttentionBackendEnum[place], f"{auto.__name__}.{place}")
        elif place == "FLASHMLA_SPARSE":
            _claim(AttentionBackendEnum[place], f"{auto.__name__}.{auto.OVERRIDE}{place}")


def _claim(member: Any, path: str) -> None:
    """Register a path for a member, unless another plugin has registered one before."""
    from vllm.v1.attention.backends.registry import register_backend

    taken = member.get_path() if member.is_overridden() else None
    if taken is not None and not taken.startswith("mla_portable."):
        settings.logger.warning("mla_portable leaves %s alone: %s was registered for it before", member.name, taken)
        return
    register_backend(member, path)
