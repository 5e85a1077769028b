# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""The layers' warm-up inside of vLLM's own: no request waits for a kernel, and what kernels take of the device is counted.

vLLM's dummy runs have no attention metadata, but for decodes that are captured, so they reach few kernels of a sparse layer.
Its worker warms our layers at two points, in every version from 0.17 to 0.33:

    determine_available_memory   before memory is measured: with blocks as the default has them
    compile_or_warm_up_model     before graphs are captured: with blocks as they lie in the cache, where that is another call

Not where a builder is made: vLLM does that inside of memory pools, whose contents sleep mode discards, and libraries keep small
tensors from their first call on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from mla_portable.choose import get_registry
from mla_portable.engines.vllm import layer_choice
from mla_portable.engines.vllm.imports import when_imported
from mla_portable.engines.vllm.layer_parts import PARTS

WORKER_MODULE: Final = "vllm.v1.worker.gpu_worker"
METHODS: Final = ("determine_available_memory", "compile_or_warm_up_model")
BUILDS: Final = "load_model"
"""The worker's method that builds the model."""


def install() -> None:
    """Prepare the worker's class; calling it again changes nothing."""
    when_imported(WORKER_MODULE, warm_worker)


def warm_worker(module: Any) -> None:
    """Have the module's worker warm our layers first, in both methods, and offer our layer before it builds the model."""
    for name in METHODS:
        setattr(module.Worker, name, _first(lambda config: warm_model(config), getattr(module.Worker, name)))
    setattr(module.Worker, BUILDS, _first(layer_choice.offer, getattr(module.Worker, BUILDS)))


def _first(action: Callable[[Any], None], method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def with_action(worker: Any, *args: Any, **kwargs: Any) -> Any:
        action(worker.vllm_config)
        return method(worker, *args, **kwargs)

    return with_action


def warm_model(vllm_config: Any) -> None:
    """Warm the layers that were built for a configuration, each kind of them once in a process.

    Raises: whatever a call of a layer raises; such a layer could not serve.
    """
    for layer in vllm_config.compilation_config.static_forward_context.values():
        impl: Any = getattr(layer, "impl", None)
        cache = cache_of(layer)
        if hasattr(impl, "warm_up"):
            impl.warm_up(vllm_config, cache)
        parts: Any = getattr(layer, PARTS, None)
        if parts is not None and cache is not None:
            parts.warm_up(cache)


def cache_of(layer: Any) -> Tensor | None:
    """The layer's cache, None before there is one. Up to 0.19 a list has it, of an entry for each virtual engine."""
    cache = getattr(layer, "kv_cache", None)
    if isinstance(cache, (list, tuple)):
        cache = cache[0] if cache else None
    return cache if isinstance(cache, Tensor) and cache.numel() else None


def warmed() -> set[tuple[object, ...]]:
    """The kinds of layers that were warmed under the policy in force."""
    return get_registry().keep("vLLM's warmed layers", set)
