# SPDX-License-Identifier: Apache-2.0
"""A vendor that is no "cuda": importing this renames torch's privateuse1 to "acme", with two equal devices made of CPU memory.

Its tensors say `device(type="acme", index=0)` or 1; each holds a CPU tensor, and every operator runs on that. There are no
streams, events, graphs or pinned memory. As a plugin it brings a detector, and a merge_states that takes acme tensors only.
The variable MLA_TEST_DEVICE_TYPE gives the type another name.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from types import ModuleType

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from mla_portable.contracts import DeviceFacts, Implementation, Reason, Support, hookimpl
from mla_portable.primitives import MERGE_STATES

TYPE = os.environ.get("MLA_TEST_DEVICE_TYPE", "acme")
FACTS = DeviceFacts(
    vendor="acme", name="Acme One", arch="a1", device_type=TYPE, num_sms=4, memory_bytes=1 << 34, graph_capture=False
)
current, guards, served, checked = [0], [], [], []
"""The current device; the indices that were made current for a block; (device of the tensors, current device) of acme.merge's
calls; the current device of its checks."""


class AcmeTensor(torch.Tensor):
    """A view of a CPU tensor that says it is on the device."""

    @staticmethod
    def __new__(cls, held: torch.Tensor, index: int):
        device, strides = torch.device(TYPE, index), held.stride()
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=strides, storage_offset=held.storage_offset(), dtype=held.dtype, device=device
        )

    def __init__(self, held: torch.Tensor, index: int) -> None:
        self.held = held

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self):
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        return on_cpu(op, args, kwargs or {})


def on_cpu(op, args, kwargs):
    """Run `op` on the held tensors; results are on the first tensor's device unless the call asks for another one."""
    given, spec = tree_flatten((args, dict(kwargs)))
    held = {id(value.held): value for value in given if isinstance(value, AcmeTensor)}
    plain_args, plain_kwargs = tree_unflatten([value.held if isinstance(value, AcmeTensor) else value for value in given], spec)
    wanted = plain_kwargs.get("device") or next((value.device for value in given if isinstance(value, AcmeTensor)), "cpu")
    where = torch.device(wanted)
    index = current[0] if where.index is None else where.index
    if plain_kwargs.get("device") is not None:
        plain_kwargs["device"] = "cpu"
    if plain_kwargs.get("pin_memory"):
        raise RuntimeError("acme pins no memory")
    results = op(*plain_args, **plain_kwargs)
    if op._schema.name == "aten::copy_" and not isinstance(args[0], AcmeTensor):
        return args[0]  # a copy to the CPU

    def back(value):
        if not isinstance(value, torch.Tensor) or where.type != TYPE:
            return value
        return held[id(value)] if id(value) in held else AcmeTensor(value, index)

    return tree_map(back, results)


def factory(name):
    def make(*args, **kwargs):
        return on_cpu(name, args, {**kwargs, "device": kwargs.get("device") or TYPE})

    return make


@contextmanager
def _device(index: int):
    before, current[0] = current[0], index
    guards.append(index)
    try:
        yield
    finally:
        current[0] = before


def _module() -> ModuleType:
    module = ModuleType(f"torch.{TYPE}")
    module.is_available = lambda: True
    module.device_count = lambda: 2
    module.current_device = lambda: current[0]
    module.set_device = lambda index: current.__setitem__(0, index)
    module.device = _device
    module.synchronize = lambda device=None: None
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    return module


_setup_privateuseone_for_python_backend(TYPE, backend_module=_module())
LIBRARY = torch.library.Library("aten", "IMPL")
for _op in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default):
    LIBRARY.impl(_op, factory(_op), "PrivateUse1")


def detect(device: torch.device) -> DeviceFacts | None:
    return FACTS if device.type == TYPE else None


def merge(outs, lses, **given):
    served.append((str(outs.device), current[0]))
    return MERGE_STATES.reference(outs, lses, **given)


def check(facts: DeviceFacts) -> tuple[Reason, ...]:
    checked.append(current[0])
    return ()


@hookimpl
def mla_portable_register(registrar) -> None:
    registrar.add_detector(detect)
    support = Support(source="this test", device_types=(TYPE,), vendors=("acme",), graph=False)
    registrar.add(Implementation("acme.merge", MERGE_STATES, support, bind=lambda request: merge, check=check))
