# SPDX-License-Identifier: Apache-2.0
"""The acme plugin: declares what the vendor's library can run, and recognises the vendor's devices.

Light on purpose: the library is imported in `check` and `bind`, so listing implementations costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

import torch

from mla_portable.contracts import (
    DeviceFacts,
    Implementation,
    Reason,
    Registrar,
    Request,
    Support,
    hookimpl,
)
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL, SparseDecode, SparsePrefill

LIBRARY = "mla_portable_acme.vendor_library"
SYMBOL = "sparse_mla_fwd"
DECODE_SYMBOL = "paged_mla_decode"

SUPPORT = Support(
    source="acme kernel manual 1.2, section 3",
    device_types=("cpu", "cuda"),
    vendors=("acme", "cpu"),
    kv_layouts=("bf16",),
    padded_heads=(64,),
    topk_multiple=64,
    attn_sink=False,
    lengths=False,
    graph=False,
)

DECODE_SUPPORT = Support(
    source="acme kernel manual 1.2, section 4",
    device_types=("cpu", "cuda"),
    vendors=("acme", "cpu"),
    kv_layouts=("bf16",),
    padded_heads=(64,),
    topk_multiple=64,
    block_sizes=(64,),
    attn_sink=False,
    graph=False,
)


def check_decode(device: DeviceFacts) -> Iterable[Reason]:
    """As `check`, for the decode kernel."""
    return check(device, DECODE_SYMBOL)


def bind_decode(request: Request) -> SparseDecode:
    """As `bind`, for the decode kernel."""
    from mla_portable_acme.sparse_decode import AcmeSparseDecode

    return AcmeSparseDecode(import_module(LIBRARY))


def check(device: DeviceFacts, symbol: str = SYMBOL) -> Iterable[Reason]:
    """Is the library here, and does it have the symbol that the adapter calls?"""
    try:
        library = import_module(LIBRARY)
    except ImportError as error:
        return [Reason("library", "missing", str(error), "install acme's kernel package")]
    if not hasattr(library, symbol):
        return [Reason("symbol", symbol, "not in this version of the library", "install acme's kernels 1.2 or newer")]
    return []


def bind(request: Request) -> SparsePrefill:
    """The callable for one request; the adapter is imported only when it is wanted."""
    from mla_portable_acme.sparse_prefill import AcmeSparsePrefill

    return AcmeSparsePrefill(import_module(LIBRARY))


def detect(device: torch.device) -> DeviceFacts | None:
    """Facts of acme's devices, which torch drives through its CUDA interface; None for every other device."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    if not properties.name.startswith("Acme "):
        return None
    return DeviceFacts(
        vendor="acme",
        name=properties.name,
        arch=f"acme{properties.major}{properties.minor}",
        num_sms=properties.multi_processor_count,
        shared_memory=48 << 10,
        memory_bytes=properties.total_memory,
        has_fp64=False,
    )


@hookimpl
def mla_portable_register(registrar: Registrar) -> None:
    """Offer acme's two kernels, and recognise its devices."""
    registrar.add_detector(detect)
    registrar.add(
        Implementation(
            name="acme.v1",
            primitive=SPARSE_PREFILL,
            support=SUPPORT,
            bind=bind,
            check=check,
            preference=20,
        )
    )
    registrar.add(
        Implementation(
            name="acme.v1",
            primitive=SPARSE_DECODE,
            support=DECODE_SUPPORT,
            bind=bind_decode,
            check=check_decode,
            preference=20,
        )
    )
