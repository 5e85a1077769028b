# SPDX-License-Identifier: Apache-2.0
"""What FlashMLA can run behind its adapters, as data, for SM90 and SM100; every other architecture is refused by it.

SM100 is declared from the sources that are named here; it was never run by this project.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from mla_portable.contracts import Primitive, Reason, Request, Support
from mla_portable.layouts import BF16_NOPE, FP8_DS_MLA, FP8_V4, SCALE_FORMATS
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL
from mla_portable_common.flash_mla.head_padding import KERNEL_HEADS

ARCHS: Final = ("sm90", "sm100")
TRUNCATION_VARIABLE: Final = "MLA_PORTABLE_NVIDIA_TRUNCATED_SCALES"
"""Set to "allow", SM100 may read scales that are no powers of two, each cut down to one: values lose up to half."""
NATIVE_HEADS: Final[dict[str, frozenset[int]]] = {"sm90": frozenset(), "sm100": frozenset()}
"""By arch, head counts below 64 that sparse_prefill runs unpadded where the provider has them, because that was measured to be
faster. None was: the paths for 8, 16 and 32 heads in vLLM 0.33.0's build took longer than 64 heads
(docs/dev/nvidia-adapters.md)."""

_SOURCES: Final[dict[tuple[Primitive, str], str]] = {
    (SPARSE_DECODE, "sm90"): "FlashMLA 9241ae3: csrc/api/sparse_decode.h, README; a scale is rounded to bf16, within "
    "the tolerances of amax",
    (SPARSE_DECODE, "sm100"): "FlashMLA 9241ae3: csrc/api/sparse_decode.h, README, pull request 184 (scales cut down "
    "to powers of two); not run here",
    (
        SPARSE_PREFILL,
        "sm90",
    ): "FlashMLA 9241ae3: flash_mla_sparse_fwd and its tests; vLLM 0.33.0's flash_mla_interface.py",
    (SPARSE_PREFILL, "sm100"): "FlashMLA 9241ae3: flash_mla_sparse_fwd and its tests; not run here",
}


class _AnyScales(Support):
    """Claims to read `pow2` scales without loss, and so is probed and judged; does not refuse others."""

    __slots__ = ()

    def shape_reasons(self, request: Request) -> Iterator[Reason]:
        """As declared, whatever the scales are."""
        if request.kv_layout == FP8_DS_MLA.name:
            request = request.but(scale_format="pow2")
        return super().shape_reasons(request)


def truncation_allowed(environ: Mapping[str, str]) -> bool:
    """The user accepts scales that are cut down to powers of two."""
    return environ.get(TRUNCATION_VARIABLE, "").strip().lower() == "allow"


def attention_support(
    primitive: Primitive, arch: str, *, device_types: tuple[str, ...] = ("cuda",), allow_truncation: bool = False
) -> Support:
    """The declaration for one primitive on one architecture.

    K is padded with absent indices and block sizes are free, so neither has a limit here.

    Args:
        device_types: ("cuda",) but for tests that run stand-ins of the kernels on a CPU.
        allow_truncation: SM100 decode does not refuse scales that it cuts down (TRUNCATION_VARIABLE).
    """
    common: dict[str, Any] = {
        "source": _SOURCES[primitive, arch],
        "device_types": device_types,
        "vendors": ("nvidia",),
        "archs": (arch,),
        "padded_heads": KERNEL_HEADS,
        "cache_alignment": 16,
    }
    if primitive is SPARSE_PREFILL:
        return Support(**common, kv_layouts=("bf16",))
    kind = _AnyScales if arch == "sm100" and allow_truncation else Support
    scale_formats = SCALE_FORMATS if arch == "sm90" else ("pow2",)
    return kind(
        **common,
        kv_layouts=(FP8_DS_MLA.name,),
        needs_whole_rows=arch != "sm90",
        scale_formats=scale_formats,
    )


def nope_support(*, device_types: tuple[str, ...] = ("cuda",)) -> Support:
    """The declaration for sparse_prefill on `bf16_nope`, rows of 512, on SM90 and SM100: what DeepSeek-V4 made FlashMLA add."""
    return Support(
        source="FlashMLA 9241ae3: csrc/api/sparse_fwd.h (d_qk 512) and its tests; SM100 was not run here",
        device_types=device_types,
        vendors=("nvidia",),
        archs=ARCHS,
        kv_layouts=(BF16_NOPE.name,),
        padded_heads=KERNEL_HEADS,
        cache_alignment=16,
    )


def v4_support(*, device_types: tuple[str, ...] = ("cuda",)) -> Support:
    """The declaration for sparse_decode on `fp8_v4`, with a second cache or without, on SM90.

    Any block size of either cache will do: rows are loaded 16 bytes at a time, from blocks that begin at multiples of that.
    On SM100 the kernels have other schedules, which are not computed here.
    """
    return Support(
        source="FlashMLA 9241ae3: csrc/api/sparse_decode.h, csrc/sm90/decode/sparse_fp8/splitkv_mla.cuh (MODEL1)",
        device_types=device_types,
        vendors=("nvidia",),
        archs=("sm90",),
        kv_layouts=(FP8_V4.name,),
        padded_heads=KERNEL_HEADS,
        cache_alignment=16,
        extra_cache=True,
    )
