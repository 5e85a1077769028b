# SPDX-License-Identifier: Apache-2.0
"""A CPU that stands in for masked_prefill: it takes what a launch packs by the names of the source's parameters."""

from __future__ import annotations

import re
import struct
from importlib.resources import files
from typing import Any

import torch
from machines import H200
from native_model import Memory

from mla_portable.primitives import MASKED_PREFILL
from mla_portable_nvidia import native
from mla_portable_nvidia.native import masked_prefill as masked

__all__ = ["COUNTER", "SOURCE", "MaskedModel"]

SOURCE = files(native).joinpath("masked_prefill.cu").read_text(encoding="utf-8")
COUNTER = torch.zeros(1, dtype=torch.int32)


def parameters() -> list[tuple[str, str]]:
    """(name, letters of `struct`) of the kernel's parameters behind the maps, in the order of the source."""
    listed = re.search(r" masked_prefill\(\n(.*?)\) \{", SOURCE, re.DOTALL)
    strides = re.search(r"struct Strides \{\s*i64 ([^;]+);", SOURCE)
    assert listed and strides
    found: list[tuple[str, str]] = []
    for declaration in listed[1].split(","):
        *kind, name = declaration.replace("__restrict__", "").split()
        if "TensorMap" in kind:
            found.append((name, "128s"))
        elif kind == ["Strides"]:
            found += [(each, "q") for each in strides[1].split(", ")]
        else:
            found.append((name, "P" if kind[-1].endswith("*") else {"float": "f", "int": "i"}[kind[-1]]))
    return found


class MaskedModel:
    """A build, loaded: it reads what a launch packs by the names of the source's parameters, and attends by the reference."""

    def __init__(self, build: Any, changing: str, fixed: str, threads: int, shared: int, wide: bool) -> None:
        self.build, self.fields, self.launches = build, f"{changing} {fixed}", []
        names = "".join(letter for _, letter in parameters())
        spelled = "".join(
            letter * int(count or 1) if letter != "s" else f"{count}s"
            for count, letter in re.findall(r"(\d*)(\w)", self.fields.replace(" ", ""))
        )
        assert spelled == names, "the launch and the source have the same parameters"
        assert (threads, shared, wide) == (384, build.shared_bytes, False)

    def prepare(self, grid: tuple[int, int], cluster: int, *fixed: Any) -> Any:
        assert cluster == grid[1] == 1 and grid[0] <= H200.num_sms
        return lambda *changing: self.run(grid[0], struct.unpack(self.fields, struct.pack(self.fields, *changing, *fixed)))

    def run(self, blocks: int, values: tuple[Any, ...]) -> None:
        at, memory = dict(zip([name for name, _ in parameters()], values, strict=True)), Memory()
        self.launches.append({**at, "blocks": blocks})
        heads, requests, (qk, value) = at["num_heads"], at["num_requests"], (self.build.qk_head_dim, self.build.v_head_dim)
        starts = [memory(at[name], torch.int32, (requests + 1,), (1,)) for name in ("q_starts", "k_starts")]
        tokens, keys = (int(each[-1]) for each in starts)
        q, k, v, out = (
            memory(at[name], torch.bfloat16, (rows, heads, width), (at[f"{name}_{axis}"], at[f"{name}_h"], 1))
            for name, rows, width, axis in (
                ("q", tokens, qk, "t"), ("k", keys, qk, "n"), ("v", keys, value, "n"), ("out", tokens, value, "t")
            )
        )  # fmt: skip
        for each in (at["out"], at["q"], *((at["k"], at["v"]) if keys else ())):
            assert each % 16 == 0
        assert all(
            stride % 8 == 0 for x in (q, k, v, out) for size, stride in zip(x.shape, x.stride()[:2], strict=False) if size > 1
        )
        lse = memory(at["lse_out"], torch.float32, (tokens, heads), (at["lse_t"], at["lse_h"]))
        selection = None
        if at["selection"]:
            selection = memory(at["selection"], torch.int32, (tokens, at["words_in_row"]), (at["selection_t"], 1))
        lengths = [each.diff().max().item() for each in starts]
        assert lengths[0] <= 128 * at["query_tiles"] and 1 <= at["group_streams"] <= heads * requests
        mapped = [struct.unpack_from("2Q", at[name]) for name in ("q_map", "k_map", "v_map")]
        of_keys = [(at["k"], self.build.keys), (at["v"], self.build.keys)] if keys else [(at["q"], self.build.keys)] * 2
        assert mapped == [(at["q"], masked.QUERIES), *of_keys] and at["counter"] == COUNTER.data_ptr()
        MASKED_PREFILL.reference(
            q, k, v, *starts, softmax_scale=at["scale_log2"] / masked._LOG2_E, max_query_len=lengths[0], max_key_len=lengths[1],
            causal=bool(at["causal"]), selection=selection, out=out, lse_out=lse,
        )  # fmt: skip
