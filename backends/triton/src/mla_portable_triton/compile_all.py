# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel of the plugin for the architectures that are named, and hold each against that device's shared memory.

    python -m mla_portable_triton.compile_all [--quick] [--json] [--kernel NAME] [sm80 gfx942 ...]

compiles for all of `aot.TARGETS` where none is named. It needs no GPU, and must run with Triton's interpreter off. The exit
status is 1 when a kernel does not compile or does not fit.
"""

from __future__ import annotations

import argparse
import json
import pkgutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any, Final

from mla_portable_triton import kernels
from mla_portable_triton.aot import TARGETS, TENSOR_MEMORY, AotVariant, compile_variant
from mla_portable_triton.tile_rows import SHARED_MEMORY

E4M3_NATIVE_ARCHS: Final = ("sm89", "sm90", "sm100", "sm120", "gfx950")
"""Where DeviceFacts.has_fp8_conversion is true, so that kernels run with E4M3_NATIVE."""
_ATTENTION: Final = ("sparse_attention_kernel", "sparse_attention_fp8_kernel")
_TOPK: Final = ("guess_kernel", "count_kernel", "compact_kernel", "select_kernel")
KERNELS: Final[dict[str, tuple[str, ...]]] = {
    "triton.portable / cache_write": ("cache_write_kernel",),
    "triton.portable / concat_mla_k": ("concat_mla_k_kernel",),
    "triton.portable / convert_indices": ("convert_indices_kernel",),
    "triton.portable / gather_upconvert": ("gather_upconvert_kernel",),
    "triton.portable / indexer_cache_write": ("index_write_kernel",),
    "triton.portable / indexer_logits": ("decode_kernel", "prefill_kernel"),
    "triton.portable / indexer_logits_ragged": ("ragged_kernel",),
    "triton.portable / indexer_logits_blocks": ("blocks_kernel",),
    "triton.portable / indexer_select": ("decode_kernel", "prefill_kernel", *_TOPK, "chosen_scores_kernel"),
    "triton.portable / masked_prefill": ("masked_prefill_kernel",),
    "triton.portable / merge_states": ("merge_states_kernel",),
    "triton.portable / norm_rope_write": ("norm_rope_write_kernel",),
    "triton.portable / pack_selection": ("pack_selection_kernel",),
    "triton.portable / quantize_per_tensor": ("partial_amax_kernel", "quantize_kernel"),
    "triton.portable / rope_quantize_queries": ("rope_quantize_queries_kernel",),
    "triton.portable / sparse_decode": (*_ATTENTION, "merge_states_kernel"),
    "triton.portable / sparse_prefill": _ATTENTION,
    "triton.portable / topk_select": _TOPK,
}
"""What `ci/proven.py` reads: "implementation / primitive" -> the kernels that it launches."""


def kernel_modules() -> list[ModuleType]:
    """The files of `kernels` that have kernels; the others hold what these share."""
    names = sorted(module.name for module in pkgutil.iter_modules(kernels.__path__))
    modules = [import_module(f"{kernels.__name__}.{name}") for name in names]
    return [module for module in modules if hasattr(module, "aot_variants")]


def variants_of(module: ModuleType, arch: str) -> list[AotVariant]:
    """What `arch` runs of one kernel file."""
    offered = {"arch": arch, "e4m3_native": arch in E4M3_NATIVE_ARCHS}
    accepted = signature(module.aot_variants).parameters
    return list(module.aot_variants(**{name: value for name, value in offered.items() if name in accepted}))


def compile_arch(arch: str, *, names: Sequence[str] = (), quick: bool = False) -> Iterator[dict[str, Any]]:
    """A record for each variant: `CompiledSummary` with kernel, limit, seconds and error ("" when all is well).

    Args:
        names: kernel files to compile, () for all. quick: only the first and the last variant of each kernel.
    """
    limit = SHARED_MEMORY[arch]
    for module in kernel_modules():
        if names and module.__name__.rpartition(".")[2] not in names:
            continue
        variants = variants_of(module, arch)
        for variant in _first_and_last_of_each_kernel(variants) if quick else variants:
            record = {
                "arch": arch,
                "label": variant.label,
                "kernel": variant.kernel.__name__,
                "limit": limit,
                "error": "",
            }
            begin = time.perf_counter()
            try:
                record |= {key: value for key, value in asdict(compile_variant(variant, arch)).items() if key not in record}
            except Exception as error:  # whatever the compiler raises belongs in the report, and the other variants too
                record["error"] = f"{type(error).__name__}: {error}"
            else:
                if record["shared"] > limit:
                    record["error"] = f"{record['shared']} bytes of shared memory, {arch} has {limit}: choose a smaller tile"
                elif record["tensor_memory"] > TENSOR_MEMORY:
                    columns = record["tensor_memory"]
                    record["error"] = f"{columns} columns of tensor memory, {arch} has {TENSOR_MEMORY}: choose a smaller tile"
            yield record | {"seconds": round(time.perf_counter() - begin, 3)}


def _first_and_last_of_each_kernel(variants: Sequence[AotVariant]) -> list[AotVariant]:
    chosen: list[AotVariant] = []
    for kernel in dict.fromkeys(variant.kernel for variant in variants):
        of_kernel = [variant for variant in variants if variant.kernel is kernel]
        chosen += of_kernel[:1] if len(of_kernel) == 1 else [of_kernel[0], of_kernel[-1]]
    return chosen


def _line(record: dict[str, Any]) -> str:
    usage = f"shared {record.get('shared', '-'):>6}  registers {record.get('registers')}  spilled {record.get('spilled')}"
    return f"{record['arch']:<8} {record['label']:<48} {record['seconds']:6.2f} s  {record['error'] or usage}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m mla_portable_triton.compile_all", description="Compile every kernel.")
    parser.add_argument("arch", nargs="*", help=f"among {', '.join(TARGETS)}; all of them where none is named")
    parser.add_argument("--kernel", action="append", default=[], help="a file of kernels/; may be given several times")
    parser.add_argument("--quick", action="store_true", help="only the first and the last variant of each kernel")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    unknown = [arch for arch in options.arch if arch not in TARGETS]
    if unknown:
        parser.error(f"{', '.join(unknown)}: expected {', '.join(TARGETS)}")
    known = [module.__name__.rpartition(".")[2] for module in kernel_modules()]
    unknown = [name for name in options.kernel if name not in known]
    if unknown:
        parser.error(f"--kernel {', '.join(unknown)}: expected {', '.join(known)}")
    failed = False
    for arch in options.arch or TARGETS:
        for record in compile_arch(arch, names=options.kernel, quick=options.quick):
            failed |= bool(record["error"])
            sys.stdout.write(f"{json.dumps(record) if options.json else _line(record)}\n")
            sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
