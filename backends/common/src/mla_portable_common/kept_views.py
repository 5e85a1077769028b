# SPDX-License-Identifier: Apache-2.0
"""Views of callers' tensors, kept for as long as those live and no longer: they never keep a cache's memory alive.

Creating a view takes the host longer than the rest of a plain call, and layers pass the same caches in every step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor

V = TypeVar("V")


class KeptViews(Generic[V]):
    """What `make` returned for a tensor, by the tensor's identity.

    A caller that gives a tensor other memory (`tensor.data = ...`, `set_`) gets views of the new memory in its next call. Until
    then the views keep the old memory alive, because they are views of its storage. Memory that is released and mapped again
    at the same address leaves the views right.
    """

    def __init__(self, make: Callable[[Tensor], V]) -> None:
        """make: views of a tensor. It gets a detached one: a view of what autograd knows about would keep that alive."""
        self._make = make
        self._seen: dict[int, tuple[weakref.ref[Tensor], int, tuple[int, ...], tuple[int, ...], V]] = {}

    def known(self, tensor: Tensor) -> V | None:
        """What was made for this tensor, unless its memory, shape or strides have changed since; else None."""
        seen = self._seen.get(id(tensor))
        if seen is None:
            return None
        caller, address, shape, strides, views = seen
        same = caller() is tensor and tensor.data_ptr() == address
        return views if same and tensor.shape == shape and tensor.stride() == strides else None

    def of(self, tensor: Tensor) -> V:
        """What is made for this tensor. Raises: what `make` raises."""
        views = self.known(tensor)
        if views is None:
            key, views = id(tensor), self._make(tensor.detach())
            caller = weakref.ref(tensor, lambda gone: self._forget(key, gone))
            self._seen[key] = caller, tensor.data_ptr(), tensor.shape, tensor.stride(), views
        return views

    def _forget(self, key: int, gone: weakref.ref[Tensor]) -> None:
        if key in self._seen and self._seen[key][0] is gone:
            del self._seen[key]
