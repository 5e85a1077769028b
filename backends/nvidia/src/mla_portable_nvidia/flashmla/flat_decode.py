# SPDX-License-Identifier: Apache-2.0
"""sparse_decode on a BF16 cache by a prefill kernel on flat rows: each query token is a row of its own.

FlashMLA's decode kernel reads FP8 alone, so its prefill kernel serves. It does not split a row's keys over multiprocessors;
where that would leave them idle, `split_prefill` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from mla_portable.contracts import Implementation, Request, Support
from mla_portable.layouts import BF16, BF16_NOPE
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL, SparseDecode
from mla_portable_common.flash_mla.head_padding import KERNEL_HEADS
from mla_portable_common.flat_rows import FlatDecode
from mla_portable_nvidia.flashmla.attention import NOPE_NAME, bind_sparse_prefill, check_kernel, read_layout
from mla_portable_nvidia.flashmla.discovery import find_kernel
from mla_portable_nvidia.flashmla.split_prefill import SplitPrefill

_PREFERENCE: Final = 15.0
"""After the kernels that compute the heads that are there, where nothing was measured. On an H200 this one is the fastest for
64 and 128 heads from 16 rows on; one number cannot say both."""
_PREFERENCE_NOPE: Final = 8.4
"""In front of FlashAttention 3, which multiplies rows without a rotary part as if they had one: with 64 and 128 heads an H200
takes 0.87 to 0.99 of its time from 64 rows on."""


def bind_flat_decode(request: Request) -> SparseDecode:
    """sparse_decode on the prefill kernel of this device's provider. Raises: MLAPortableError where there is none."""
    from mla_portable_nvidia.flashmla.row_parts import RowParts

    prefill = request.but(primitive=SPARSE_PREFILL, block_size=None, query_len=None)
    whole, device = bind_sparse_prefill(prefill), request.device
    found = find_kernel(SPARSE_PREFILL, device, layout=read_layout(request))
    split = SplitPrefill(
        whole,
        found.kernel,
        RowParts(),
        base_2=found.traits.lse_base_2,
        heads=found.traits.heads,
        num_sms=device.num_sms,
        sanitises=not request.clean_indices,
        with_lse=request.lse,
    )
    return FlatDecode(split)


def flat_implementations(*, device_types: tuple[str, ...] = ("cuda",)) -> Iterator[Implementation]:
    """sparse_decode of a BF16 cache, with a rotary part or without, for SM90.

    device_types: ("cuda",) but for tests with stand-ins of the kernel.
    """
    for name, layout, prefills_as, preference in (
        ("nvidia.flashmla_bf16", BF16, "nvidia.flashmla", _PREFERENCE),
        (NOPE_NAME, BF16_NOPE, NOPE_NAME, _PREFERENCE_NOPE),
    ):
        yield Implementation(
            name=name,
            primitive=SPARSE_DECODE,
            support=Support(
                source="FlashMLA 9241ae3: flash_mla_sparse_fwd, a query token as a token of a prefill",
                device_types=device_types,
                vendors=("nvidia",),
                archs=("sm90",),
                kv_layouts=(layout.name,),
                padded_heads=KERNEL_HEADS,
                cache_alignment=16,
                needs_whole_rows=True,
            ),
            bind=bind_flat_decode,
            check=partial(check_kernel, SPARSE_PREFILL, layout=layout),
            preference=preference,
            prefills_as=prefills_as,
        )
