# SPDX-License-Identifier: Apache-2.0
"""Compiling kernels ahead of time, for targets that are not at hand, and what the compiled kernel takes of a device.

A kernel file offers its representative instances as `AotVariant`s; `compile_variant` turns one into machine code with the
compilers that ship in Triton. No GPU and no driver take part. Triton must not have been imported in interpreter mode.
Compiling needs Triton 3.5; importing does not, because every kernel file names its variants here.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import triton

from mla_portable.kit.triton_launcher import OPTIONS, splits_by_alignment

TARGETS: Final[dict[str, tuple[str, int | str, int]]] = {
    "sm80": ("cuda", 80, 32),
    "sm86": ("cuda", 86, 32),
    "sm89": ("cuda", 89, 32),
    "sm90": ("cuda", 90, 32),
    "sm100": ("cuda", 100, 32),
    "sm120": ("cuda", 120, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
    "gfx1100": ("hip", "gfx1100", 32),
}
"""DeviceFacts.arch -> what Triton compiles for: the arguments of its GPUTarget."""

TENSOR_MEMORY: Final = 512
"""Columns of tensor memory of an sm100 multiprocessor; a kernel that needs more compiles to a trap."""


@dataclass(frozen=True, slots=True)
class AotVariant:
    """One instance of a kernel.

    Attributes:
        kernel: the @triton.jit function.
        signature: run-time parameter -> Triton type ("i32", "fp32", "*bf16"); pointers that Triton tells apart by alignment
            are taken as 16-byte aligned, as torch allocates them, and strides that it specialises on as multiples of 16.
        constexprs: parameter -> value; None for a tensor that is not given. Together with `signature` every parameter.
        num_warps, num_stages: launch options. max_registers: of a thread, on NVIDIA's targets; 0 for no limit.
        label: a name for reports, unique in its file.
    """

    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, object]
    num_warps: int
    num_stages: int
    label: str
    max_registers: int = 0


@dataclass(frozen=True, slots=True)
class CompiledSummary:
    """What a compiled kernel takes of a thread block.

    Attributes:
        shared: bytes of shared memory. tensor_memory: columns, 0 on parts without.
        registers: per thread, None where the compiler does not say.
        spilled: bytes per thread that spilled to local memory (scratch), None likewise.
        asm: the stages that were produced, e.g. ("ttir", "ttgir", "llir", "ptx", "cubin").
    """

    label: str
    arch: str
    shared: int
    tensor_memory: int
    registers: int | None
    spilled: int | None
    asm: tuple[str, ...]


def variant(
    kernel: Any, label: str, num_warps: int, num_stages: int = 1, max_registers: int = 0, **given: object
) -> AotVariant:
    """An instance of `kernel`. given: parameter -> Triton type where it is a string, else the value of a constexpr.

    What is not given is a size or a stride, "i32"; pointers (`_ptr`) and constexprs (upper case) have to be.
    """
    sizes = [name for name in kernel.arg_names if name not in given and name.islower() and not name.endswith("_ptr")]
    types = {name: value for name, value in given.items() if isinstance(value, str)}
    constexprs = {name: value for name, value in given.items() if name not in types}
    return AotVariant(kernel, types | dict.fromkeys(sizes, "i32"), constexprs, num_warps, num_stages, label, max_registers)


def compiled(variant: AotVariant, arch: str) -> Any:
    """What Triton makes of `variant` for `arch`, one of TARGETS. Raises what Triton raises when it does not compile."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target = GPUTarget(*TARGETS[arch])
    names = variant.kernel.arg_names
    missing = [name for name in names if name not in variant.signature and name not in variant.constexprs]
    if missing:
        raise ValueError(f"{variant.label}: no type and no value for {', '.join(missing)}")
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    params = variant.kernel.params
    strides = {param.name for param in params if "_stride" in param.name and not param.do_not_specialize}
    anywhere = {param.name for param in params if not splits_by_alignment(param)}
    # as Triton states them for a call, constants included, so that what is compiled here has the name that a call looks for
    attributes: dict[tuple[int, ...], list[Any]] = {}
    for i, name in enumerate(names):
        is_pointer = signature[name].startswith("*")
        if (is_pointer and name not in anywhere) or name in strides:
            attributes[i,] = [["tt.divisibility", 16]]
        elif is_pointer or signature[name] == "constexpr":
            attributes[i,] = []
    source = ASTSource(variant.kernel, signature, constexprs=dict(variant.constexprs), attrs=attributes)
    options: dict[str, object] = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, **OPTIONS}
    if variant.max_registers:
        options["maxnreg"] = variant.max_registers
    return triton.compile(source, target=target, options=options)


def compile_variant(variant: AotVariant, arch: str) -> CompiledSummary:
    """What there is to say of `compiled`."""
    made = compiled(variant, arch)
    registers, spilled = (_cuda_usage if TARGETS[arch][0] == "cuda" else _hip_usage)(made.asm)
    return CompiledSummary(
        label=variant.label,
        arch=arch,
        shared=made.metadata.shared,
        tensor_memory=getattr(made.metadata, "tmem_size", None) or 0,
        registers=registers,
        spilled=spilled,
        asm=tuple(made.asm),
    )


def _cuda_usage(asm: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Registers and stack bytes of a cubin, read by the cuobjdump in Triton's wheel; a kernel of ours has no other stack."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not cuobjdump.exists() or "cubin" not in asm:
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(asm["cubin"])
        cubin.flush()
        command = [str(cuobjdump), "-res-usage", cubin.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (None, None)


def _hip_usage(asm: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Vector registers and scratch bytes, from the metadata of the AMD assembly."""
    text = asm.get("amdgcn", "")
    registers = re.search(r"\.vgpr_count:\s*(\d+)", text)
    scratch = re.search(r"\.private_segment_fixed_size:\s*(\d+)", text)
    return (int(registers[1]) if registers else None), (int(scratch[1]) if scratch else None)
