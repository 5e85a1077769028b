# SPDX-License-Identifier: Apache-2.0
"""Finding one of the vendor's operations: among the operators that vllm-ascend compiles, or in torch_npu.

Nothing is imported before a device of the vendor is there. What an operation takes is read off its schema, where it has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import torch

from mla_portable.contracts import Reason
from mla_portable.kit.parameters import parameter_names

Op = Callable[..., Any]
"""One of the vendor's operations."""

VLLM_ASCEND: Final = "vllm_ascend"
TORCH_NPU: Final = "torch_npu"
_NAMESPACE: Final = "_C_ascend"
_REMEDY: Final = {
    VLLM_ASCEND: "install a vllm-ascend whose custom operators are built for this device",
    TORCH_NPU: "install a newer torch_npu and CANN",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where an operation is looked for.

    Attributes:
        package: VLLM_ASCEND, whose operators are those of `torch.ops._C_ascend`, or TORCH_NPU. name: of the operation.
        keywords: that the adapter passes.
    """

    package: str
    name: str
    keywords: tuple[str, ...]

    def __str__(self) -> str:
        return f"torch.ops.{_NAMESPACE}.{self.name}" if self.package == VLLM_ASCEND else f"{self.package}.{self.name}"

    def find(self) -> Op:
        """The operation. Raises: ImportError, AttributeError."""
        if self.package == TORCH_NPU:
            return getattr(import_module(TORCH_NPU), self.name)
        operators: Any = getattr(torch.ops, _NAMESPACE)
        if not hasattr(operators, self.name):  # not loaded yet: vllm-ascend does so when its first worker starts
            import_module("vllm_ascend.utils").enable_custom_op()
        return getattr(operators, self.name)

    def missing(self) -> Iterator[Reason]:
        """Why the operation cannot be had, or is not the one that the adapter calls."""
        remedy = _REMEDY[self.package]
        try:
            op = self.find()
        except ImportError as error:
            yield Reason("library", self.package, f"cannot be imported: {error}", remedy)
            return
        except AttributeError:
            yield Reason("operation", str(self), f"not in this version of {self.package}", remedy)
            return
        names = parameter_names(op)
        if names is not None and (absent := [each for each in self.keywords if each not in names]):
            yield Reason("calling convention", str(self), f"takes no {', '.join(absent)}", remedy)
