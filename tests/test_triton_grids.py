# SPDX-License-Identifier: Apache-2.0
"""What the grids of Triton's kernels count: CUDA and HIP end their second and third axis at 65,535, so rows are on the first.

Each primitive is called with more rows than that; its launches are recorded, and nothing runs.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_portable.contracts import DeviceFacts, Primitive, Request
from mla_portable.kit.triton_launcher import TritonLauncher
from mla_portable_triton import bind_attention, bind_data, bind_indexer, bind_projections, bind_prompts, kernels

ROWS = 65_544
MOST = 65_535
FACTS = DeviceFacts(vendor="any", name="any", arch="any", device_type="cpu", num_sms=132)
INT32 = torch.int32


def launchers() -> dict[str, TritonLauncher]:
    """Every one of the plugin: file and name -> launcher."""
    files = [import_module(f"{kernels.__name__}.{each.name}") for each in pkgutil.iter_modules(kernels.__path__)]
    return {
        f"{file.__name__.rpartition('.')[2]}.{name}": value
        for file in files
        for name, value in vars(file).items()
        if isinstance(value, TritonLauncher) and vars(file).get("__name__") == file.__name__
    }


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """ROWS equal rows, of which memory holds one."""
    return torch.zeros(1, *shape, dtype=dtype).expand(ROWS, *shape)


def made(*shape: int, dtype: torch.dtype = INT32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def starts() -> Tensor:
    """Of ROWS requests of a token."""
    return torch.arange(ROWS + 1, dtype=INT32)


def pages(layout: str) -> list[Tensor]:
    """Arguments of indexer_logits: ROWS requests of one token each."""
    fp8 = layout == "index_fp8"
    q = rows(1, 128, dtype=torch.uint8).view(torch.float8_e4m3fn) if fp8 else rows(1, 128)
    cache = made(2, 64, 132, dtype=torch.uint8) if fp8 else made(2, 64, 128, dtype=torch.bfloat16)
    return [q, made(ROWS, 1, dtype=torch.float32), cache, starts(), made(ROWS), made(ROWS, 2)]


def one_request(layout: str) -> list[Tensor]:
    """The same tokens, of one request."""
    q, weights, cache, _, _, table = pages(layout)
    return [q, weights, cache, torch.tensor([0, ROWS], dtype=INT32), torch.tensor([ROWS], dtype=INT32), table[:1]]


def bound(module: Any, primitive: str, **facts: Any) -> Callable[..., Any]:
    return getattr(module, f"bind_{primitive}")(Request(Primitive.named(primitive), FACTS, **facts))


def cache(layout: str) -> Tensor:
    return made(2, 64, 656, dtype=torch.uint8) if layout == "fp8_ds_mla" else made(2, 64, 576, dtype=torch.bfloat16)


def attend(layout: str) -> None:
    shape = {"kv_layout": layout, "num_heads": 1, "topk": 64, "lse": True}
    q, indices = rows(1, 576), made(ROWS, 64)
    bound(bind_attention, "sparse_prefill", **shape)(
        q, cache(layout).view(-1, cache(layout).shape[2]) if layout == "bf16" else cache(layout), indices, softmax_scale=1.0
    )
    bound(bind_attention, "sparse_decode", **shape)(q.unsqueeze(1), cache(layout), indices.unsqueeze(1), softmax_scale=1.0)


def select(layout: str, arguments: list[Tensor]) -> None:
    bound(bind_indexer, "indexer_select", kv_layout=layout, topk=4)(*arguments, topk=4)


def share(layout: str) -> None:
    scores = made(ROWS, 4, dtype=torch.float32)
    call = bound(bind_indexer, "indexer_select", kv_layout=layout, topk=4, context_parallel=True)
    call(*pages(layout), topk=4, dcp_size=2, dcp_rank=0, interleave=1, scores_out=scores)


def ragged(layout: str) -> None:
    fp8 = layout == "index_fp8"
    q = rows(1, 128, dtype=torch.uint8).view(torch.float8_e4m3fn) if fp8 else rows(1, 128)
    keys = made(70, 128, dtype=torch.uint8).view(torch.float8_e4m3fn) if fp8 else made(70, 128, dtype=torch.bfloat16)
    scales = made(70, dtype=torch.float32) if fp8 else None
    call = bound(bind_indexer, "indexer_logits_ragged", kv_layout=layout)
    call(q, made(ROWS, 1, dtype=torch.float32), keys, scales, made(ROWS), made(ROWS), out=made(ROWS, 70, dtype=torch.float32))


def blocks(dtype: torch.dtype) -> None:
    width = 128 if dtype == torch.float8_e4m3fn else 64
    q, keys = rows(1, width, dtype=torch.uint8).view(dtype), made(2, 64, width, dtype=torch.uint8).view(dtype)
    out = made(ROWS, 8, dtype=torch.bfloat16)
    call = bound(bind_indexer, "indexer_logits_blocks", num_heads=1)
    call(q, made(ROWS, 1), rows(1), keys, made(2, 64), made(ROWS, 1), made(ROWS, 1), block_tokens=8, out=out)


def scored(layout: str, arguments: list[Tensor]) -> None:
    bound(bind_indexer, "indexer_logits", kv_layout=layout)(*arguments, out=made(ROWS, 130, dtype=torch.float32))


SLOTS = {"dtype": torch.int64}
CALLS: dict[str, Callable[[], object]] = {
    "cache_write": lambda: bound(bind_data, "cache_write", kv_layout="fp8_ds_mla")(
        rows(512), rows(64), cache("fp8_ds_mla"), made(ROWS, **SLOTS)
    ),
    "convert_indices": lambda: bound(bind_data, "convert_indices")(made(ROWS, 64), made(ROWS), made(1, 2), block_size=64),
    "gather_upconvert": lambda: bound(bind_data, "gather_upconvert", kv_layout="fp8_ds_mla")(
        cache("fp8_ds_mla"), made(ROWS, 1), made(ROWS), made(ROWS), out=torch.empty(ROWS, 576, dtype=torch.bfloat16)
    ),
    "quantize_per_tensor": lambda: bound(bind_data, "quantize_per_tensor")(made(ROWS, 64, dtype=torch.bfloat16)),
    "attention, fp8": lambda: attend("fp8_ds_mla"),
    "attention, bf16": lambda: attend("bf16"),
    "merge_states": lambda: bound(bind_attention, "merge_states")(torch.zeros(2, ROWS, 8), torch.zeros(2, ROWS)),
    "indexer_cache_write": lambda: bound(bind_indexer, "indexer_cache_write", kv_layout="index_fp8")(
        rows(128), made(2, 64, 132, dtype=torch.uint8), made(ROWS, **SLOTS)
    ),
    **{
        f"{name}, {layout}, {kind.__name__}": lambda call=call, layout=layout, kind=kind: call(layout, kind(layout))
        for name, call in (("indexer_logits", scored), ("indexer_select", select))
        for layout in ("index_fp8", "index_bf16")
        for kind in (pages, one_request)
    },
    "indexer_select, a share": lambda: share("index_fp8"),
    "indexer_logits_ragged, fp8": lambda: ragged("index_fp8"),
    "indexer_logits_ragged, bf16": lambda: ragged("index_bf16"),
    "indexer_logits_blocks, mxfp8": lambda: blocks(torch.float8_e4m3fn),
    "indexer_logits_blocks, mxfp4": lambda: blocks(torch.int8),
    "topk_select": lambda: bound(bind_indexer, "topk_select")(
        made(ROWS, 64, dtype=torch.float32), made(ROWS), made(ROWS), topk=4
    ),
    "topk_select, parts of rows": lambda: bound(bind_indexer, "topk_select")(
        torch.zeros(1, 40_000).expand(ROWS, 40_000), made(ROWS), made(ROWS), topk=4
    ),
    "pack_selection": lambda: bound(bind_prompts, "pack_selection")(made(ROWS, 4), width=64),
    "norm_rope_write": lambda: projected(),
    "rope_quantize_queries": lambda: bound(bind_projections, "rope_quantize_queries")(
        rows(1, 192), None, None, made(ROWS, **SLOTS), torch.zeros(2, 64), q_out=rows(1, 576)
    ),
    "concat_mla_k": lambda: bound(bind_prompts, "concat_mla_k")(rows(1, 128), rows(1, 64)),
    "masked_prefill, a request": lambda: masked(torch.tensor([0, ROWS], dtype=INT32), ROWS),
    "masked_prefill, requests": lambda: masked(starts(), 1),
}


def projected() -> None:
    weights, keys = {"q_norm": torch.zeros(64), "kv_norm": torch.zeros(512)}, made(2, 64, 132, dtype=torch.uint8)
    bound(bind_projections, "norm_rope_write")(
        *(rows(64), rows(576), rows(128), made(ROWS, **SLOTS), torch.zeros(2, 64)), **weights,
        index_norm=(torch.zeros(128), torch.zeros(128)), eps=1e-6, kv_cache=cache("fp8_ds_mla"),
        slot_mapping=made(ROWS, **SLOTS), index_cache=keys, q_out=rows(64),
    )  # fmt: skip


def masked(start_loc: Tensor, longest: int) -> None:
    call = bound(bind_prompts, "masked_prefill", num_heads=1, qk_head_dim=192, v_head_dim=128)
    lengths = {"max_query_len": longest, "max_key_len": longest}
    call(rows(1, 192), rows(1, 192), rows(1, 128), start_loc, start_loc, softmax_scale=1.0, **lengths)


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> dict[TritonLauncher, list[tuple[int, ...]]]:
    """Of the launches so far."""
    seen: dict[TritonLauncher, list[tuple[int, ...]]] = {}

    def record(self: TritonLauncher, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
        seen.setdefault(self, []).append(grid)

    monkeypatch.setattr(TritonLauncher, "__call__", record)
    monkeypatch.setattr(bind_indexer, "bind_part", lambda request, own: own(request))
    return seen


def test_rows_are_on_the_first_axis_of_every_launch(grids: dict[TritonLauncher, list[tuple[int, ...]]]) -> None:
    wrong = list[tuple[str, tuple[int, ...]]]()
    for name, call in CALLS.items():
        before = {launcher: len(each) for launcher, each in grids.items()}
        call()
        new = [grid for launcher, each in grids.items() for grid in each[before.get(launcher, 0) :]]
        assert new, name
        wrong += [(name, grid) for grid in new if max((*grid[1:], 1)) > MOST or grid[0] >= 1 << 31]
    assert not wrong
    known = launchers()
    assert {name for name, launcher in known.items() if launcher not in grids} == set(), "kernels that no call here launches"
    assert len(known) >= 15
