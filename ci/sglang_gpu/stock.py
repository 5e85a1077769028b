# SPDX-License-Identifier: Apache-2.0
"""SGLang's own method on the arguments of a call that the plugin serves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from mla_portable.engines.sglang import seams

METHODS = (seams.SPARSE, seams.KV, seams.FA3)


class StockNotAvailable(RuntimeError):
    """What SGLang's method calls is a stand-in: there is no result, and no time of it means anything."""


def backend_class() -> Any:
    return import_module(seams.BACKEND_MODULE).DeepseekSparseAttnBackend


def stock_call(backend: Any, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Callable[[], Tensor]:
    """A function that runs SGLang's own method. With `_forward_flashmla_kv`, FlashMLA's schedule is made now.

    It raises StockNotAvailable where a library is not there, and a stand-in for it answers.
    """
    method = getattr(backend_class(), name).__wrapped__
    bound = inspect.signature(method).bind(backend, *arguments, **named)
    if name == seams.KV:
        metadata = bound.arguments["metadata"]
        plan = backend_class()._compute_flashmla_metadata.__wrapped__
        made = plan(backend, cache_seqlens=metadata.dsa_cache_seqlens_int32, seq_len_q=1)
        bound.arguments["metadata"] = replace(metadata, flashmla_metadata=made)

    def call() -> Tensor:
        out = method(*bound.args, **bound.kwargs)
        if not isinstance(out, Tensor):
            raise StockNotAvailable(f"what {name} calls is not installed, a {type(out).__name__} stands for it")
        return out

    return call


@dataclass
class Beside:
    """Results of the calls in a block, in order. stock: a tensor, or the error of SGLang's method in words."""

    methods: list[str] = field(default_factory=list)
    ours: list[Tensor] = field(default_factory=list)
    stock: list[Tensor | str] = field(default_factory=list)

    def differences(self) -> dict[str, Any]:
        """Of stock and ours: the greatest one, or why there is none."""
        for ours, stock in zip(self.ours, self.stock, strict=True):
            if isinstance(stock, str):
                return {"stock": stock}
            return {"from_stock": float((ours.double() - stock.double()).abs().max())}
        return {}


@contextmanager
def beside_stock(*, also_stock: bool = True) -> Iterator[Beside]:
    """Every hooked call of the block also runs SGLang's own method on the same arguments."""
    found, cls = Beside(), backend_class()
    hooked = {name: getattr(cls, name) for name in METHODS}

    def both(name: str) -> Callable[..., Tensor]:
        def call(backend: Any, *arguments: Any, **named: Any) -> Tensor:
            out = hooked[name](backend, *arguments, **named)
            found.methods.append(name)
            found.ours.append(out)
            if also_stock:
                try:
                    found.stock.append(stock_call(backend, name, arguments, named)())
                    torch.cuda.synchronize()
                except StockNotAvailable as reason:
                    found.stock.append(f"not available: {reason}")
                except Exception as error:  # no such library, or a shape that it refuses: said in the report
                    found.stock.append(f"{type(error).__name__}: {error}"[:200])
            else:
                found.stock.append("not run")
            return out

        call.__wrapped__ = hooked[name].__wrapped__  # pyright: ignore[reportAttributeAccessIssue]
        return call

    try:
        for name in METHODS:
            setattr(cls, name, both(name))
        yield found
    finally:
        for name, method in hooked.items():
            setattr(cls, name, method)
