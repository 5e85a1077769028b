# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""Who writes new tokens into the cache, and which scales an FP8 cache then has.

vLLM's own operator makes the same bytes as for vLLM's other backends, so it is taken where it works; elsewhere the
cache_write primitive writes. Which scales vLLM's operator makes depends on its version (`amax` up to 0.26, `pow2` in 0.33)
and cannot be seen from Python: one token is written, once per process, and its scale is read.

With a KV connector, rows may come from elsewhere. Nodes of one version of vLLM write the same scales, so those are taken to be
that operator's; MLA_PORTABLE_VLLM_CACHE_SCALES states other ones, or that there are several kinds.
"""

from __future__ import annotations

import math
from functools import cache
from importlib import import_module
from typing import Any, Final, NamedTuple

import torch

from mla_portable.contracts import InvalidArgument
from mla_portable.engines.vllm import settings
from mla_portable.layouts import E4M3_MAX, LAYOUTS

_BLOCK: Final = 64
_LATENT: Final = 256.0
"""256 / 448 is the `amax` scale of a group of these, 1 the `pow2` scale; e4m3 holds 448 and 256, so both keep 256."""
_SCALES: Final = {"amax": _LATENT / E4M3_MAX, "pow2": 1.0}


class Writer(NamedTuple):
    """who: "vllm" or "mla_portable". scale_format: of every row that is read, None where it may be either."""

    who: str
    scale_format: str | None


class Trial(NamedTuple):
    """One token was written with vLLM's operator: it works, with these scales (FP8), or why it does not."""

    works: bool
    scale_format: str | None = None
    reason: str = ""


@cache
def try_vllm(layout: str, device: torch.device, *, nope: bool = False) -> Trial:
    """Write one token of `layout` with vLLM's operator on `device` and look at the row. Waits for the device.

    nope: a token without a rotary part, whose bytes are to come out as zeros; operators before 0.31 or so refuse it.
    """
    row = LAYOUTS[layout]
    kv_c = torch.full((1, row.value_width), _LATENT, dtype=torch.bfloat16, device=device)
    k_pe = torch.arange(0 if nope else row.rope_width, dtype=torch.bfloat16, device=device)[None]
    kv_cache = torch.zeros((2, _BLOCK, row.row_width), dtype=row.dtype, device=device)
    if nope and row.rope_width:
        kv_cache[..., row.rope_offset // row.dtype.itemsize :] = 1  # what an earlier row left behind
    slots = torch.tensor([_BLOCK + 1], dtype=torch.int64, device=device)
    scale = torch.ones((), dtype=torch.float32, device=device)
    name = layout if row.is_quantized else "auto"
    try:
        import_module("vllm._custom_ops").concat_and_cache_mla(kv_c, k_pe, kv_cache, slots, kv_cache_dtype=name, scale=scale)
        found = kv_cache[1, 1].cpu()
    except (AttributeError, ImportError, NotImplementedError, RuntimeError) as error:
        return Trial(False, reason=f"{type(error).__name__}: {error}".splitlines()[0])
    wanted = torch.cat([kv_c[0], k_pe[0]]).cpu()
    wanted = torch.nn.functional.pad(wanted, (0, row.key_width - len(wanted)))
    if not row.is_quantized:
        return Trial(True) if torch.equal(found, wanted) else Trial(False, reason="a bf16 row came out wrong")
    scales = found[row.scale_offset : row.rope_offset].view(torch.float32)
    made = next((name for name, scale in _SCALES.items() if math.isclose(scales[0], scale, rel_tol=1e-6)), None)
    if made is None or not torch.equal(row.unpack(found[None])[0], wanted):
        return Trial(False, reason=f"an {layout} row came out wrong; its scales are {scales.tolist()}")
    return Trial(True, made)


def choose_writer(layout: str, device: torch.device, vllm_config: Any | None, *, nope: bool = False) -> Writer:
    """Who writes a cache of `layout` on `device`. nope: as of AttentionSpec.

    Raises: InvalidArgument when MLA_PORTABLE_VLLM_CACHE_WRITER forces vLLM's operator and it does not work, or when
        MLA_PORTABLE_VLLM_CACHE_SCALES names scales other than those that are written here.
    """
    forced, stated, trial = settings.cache_writer(), settings.scale_format(), try_vllm(layout, device, nope=nope)
    if forced == "vllm" and not trial.works:
        expected = f"auto or mla_portable: vLLM's operator does not write {layout} on {device} ({trial.reason})"
        raise InvalidArgument("environment", settings.ENV_WRITER, got="'vllm'", expected=expected)
    who = "vllm" if trial.works and forced != "mla_portable" else "mla_portable"
    if not LAYOUTS[layout].is_quantized or stated == "mixed":
        return Writer(who, None)
    made = trial.scale_format if who == "vllm" else stated or "pow2"
    # Compiled graphs may fuse vLLM's own write into the rotary embedding, whoever writes otherwise.
    written = {made, trial.scale_format} if trial.works else {made}
    if stated is not None and written != {stated}:
        expected = f"{' and '.join(sorted(map(str, written)))}, as vLLM and mla_portable write them here"
        remedy = f"{settings.ENV_SCALES}=mixed reads each scale as it is."
        raise InvalidArgument("environment", settings.ENV_SCALES, got=repr(stated), expected=expected, remedy=remedy)
    # With a connector another node may have written the rows, with the operator that does not work here.
    received = vllm_config is not None and getattr(vllm_config, "kv_transfer_config", None) is not None
    known = len(written) == 1 and (stated is not None or trial.works or not received)
    return Writer(who, made if known else None)
