# SPDX-License-Identifier: Apache-2.0
"""SGLang's real `Indexer` in a case of its kit: quantised queries, cached keys and chosen positions, held against the rules.

The cases are run on the CPU by tests, and by `ci/gpu_sglang` on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.dsa import dsa_indexer
from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang_kit import fixture
from sglang_version import SELECTORS
from torch import Tensor

from mla_portable.layouts import INDEX_FP8

WIDTH, ROWS, HEADS, LORA = 128, 64, 32, 192
QUANT: Any = import_module(
    f"sglang.kernels.ops.{'quantization.act_quant_triton' if SELECTORS else 'attention.dsa.triton_kernel'}"
)


@dataclass
class Step:
    """queries: given to be quantised, with codes and scales. keys: bfloat16 of the new tokens. chosen [T, K]: positions."""

    queries: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    keys: Tensor | None = None
    weights: Tensor | None = None
    chosen: Tensor | None = None


def exact(x: Tensor, scale_fmt: str | None) -> tuple[Tensor, Tensor]:
    """SGLang's rule: codes of x / scale; the scale is amax / 448, or from float64 the next power of two."""
    amax = x.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-4)
    scale = amax * torch.tensor(1 / 448, dtype=torch.float32, device=x.device)
    if scale_fmt is not None:
        scale = torch.exp2(torch.ceil(torch.log2(amax.double() / 448))).float()
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def hadamard(x: Tensor) -> Tensor:
    """`rotate_activation` where there is no CUDA."""
    rows = x.float()
    for stride in (1, 2, 4, 8, 16, 32, 64):
        a, b = rows.view(*x.shape[:-1], WIDTH // 2 // stride, 2, stride).unbind(dim=-2)
        rows = torch.stack((a + b, a - b), dim=-2).view(x.shape)
    return (rows * WIDTH**-0.5).to(x.dtype)


def rotate(positions: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
    """The rotary embedding there: halves of each part [T, (H,) 64] are rotated."""
    angles = positions[:, None].float() * 10000.0 ** -(torch.arange(32) / 32)

    def rotated(part: Tensor) -> Tensor:
        turn = angles if part.dim() == 2 else angles[:, None]
        a, b = part.float().chunk(2, dim=-1)
        return torch.cat([a * turn.cos() - b * turn.sin(), b * turn.cos() + a * turn.sin()], dim=-1).to(part.dtype)

    return tuple(map(rotated, parts))


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """SGLang's indexer takes the way of CUDA; what only CUDA has is computed by torch."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(dsa_indexer, "_is_cuda", True)
        patches.setattr(dsa_indexer, "rotate_activation", hadamard)
        patches.setattr(dsa_indexer, "get_rope_wrapper", lambda *args, **named: rotate)
        patches.setattr(
            dsa_indexer.Indexer,
            "_weights_proj_bf16_in_fp32_out",
            lambda self, x: x.float() @ self.weights_proj.weight.float().T,
        )
        yield


def build(topk: int, hidden: int, device: str) -> Any:
    """A DeepSeek-V3.2 indexer of random weights: halves of the rotary part are rotated, so nothing is fused."""
    torch.manual_seed(3)
    made = dsa_indexer.Indexer(
        hidden_size=hidden,
        index_n_heads=HEADS,
        index_head_dim=WIDTH,
        rope_head_dim=64,
        index_topk=topk,
        q_lora_rank=LORA,
        max_position_embeddings=8192,
        rope_theta=10000.0,
        layer_id=0,
        scale_fmt="ue8m0",
        is_neox_style=True,
    ).to(device)
    for name, each in made.named_parameters():
        each.requires_grad_(False)
        if "norm" not in name:
            each.data = torch.randn_like(each.data.float()).mul_(each.shape[-1] ** -0.5).to(torch.bfloat16)
    assert not made.use_dsa_indexer_fusion
    return made


def run(case: Any, *, topk: int, fused_store: bool, device: str, **options: Any) -> float:
    """Run a step, compare it with the rules. Returns: the greatest part of a row's keys that were chosen otherwise.

    fused_store: SGLang's CUDA kernel writes the keys, else the two Triton kernels that it falls back to.
    """
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", "0")  # no prompt as dense attention
        built = fixture(case, index_topk=topk, **options)
    batch, pool = built.forward_batch, built.runner.token_to_kv_pool
    indexer, step = build(topk, built.input_hidden.shape[1], device), Step()
    built.backend.dsa_topk_backend = DSATopKBackend.TORCH
    pages, table = pool.get_index_k_with_scale_buffer(layer_id=0), built.runner.req_to_token_pool.req_to_token
    for request, length in enumerate(case.prefix_lens):
        keys = torch.randn(length, WIDTH, dtype=torch.bfloat16)
        put(pages, table[batch.req_pool_indices[request], :length].long(), INDEX_FP8.pack(keys, keys[:, :0], "pow2"))
    quantise, store, gate = QUANT.act_quant, dsa_indexer.Indexer._store_index_k_cache, None
    with pytest.MonkeyPatch.context() as patches, torch.no_grad():

        def seen(x: Tensor, block_size: int = 128, scale_fmt: str | None = None) -> tuple[Tensor, Tensor]:
            codes, scale = quantise(x, block_size, scale_fmt)
            step.queries.append((x.clone(), codes, scale))
            return codes, scale

        def stored(self: Any, *args: Any, **named: Any) -> None:
            step.keys = named["key"].clone()
            store(self, *args, **named)

        for name in ("_get_topk_paged", "_get_topk_ragged"):
            gate = getattr(dsa_indexer.Indexer, name)

            def chosen(self: Any, *args: Any, _own: Any = gate, _name: str = name, **named: Any) -> Tensor:
                step.weights = args[3 if _name == "_get_topk_paged" else 4].clone()
                return _own(self, *args, **named)

            patches.setattr(dsa_indexer.Indexer, name, chosen)
        patches.setattr(QUANT, "act_quant", seen)
        patches.setattr(dsa_indexer.Indexer, "_store_index_k_cache", stored)
        if not fused_store:
            patches.setattr(dsa_indexer, "can_use_dsa_fused_store", lambda *args: False)
        hidden = built.input_hidden
        lora = torch.randn(len(hidden), LORA, dtype=torch.bfloat16).to(device)
        with forward_context(ForwardContext(attn_backend=built.backend)), torch.compiler.set_stance("force_eager"):
            built.backend.init_forward_metadata(batch)
            step.chosen = indexer.forward_cuda(hidden, lora, batch.positions, batch, 0)
    judge_codes(step, *get(pages, batch.out_cache_loc.long()), fused_store=fused_store)
    requests = [request for request, count in enumerate(case.input_lens) for _ in range(count)]
    slots = table[batch.req_pool_indices[requests]].long()
    return judge_choice(step, pages, slots, built.backend.forward_metadata.dsa_seqlens_expanded.tolist())


def put(pages: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Rows [N, 132] of bytes into SGLang's pages [pages, 64 * 132]."""
    page, row = slots // ROWS, slots % ROWS
    codes = pages[:, : ROWS * WIDTH].unflatten(1, (ROWS, WIDTH))
    codes[page, row] = rows[:, :WIDTH].to(pages.device)
    scales = pages[:, ROWS * WIDTH :].unflatten(1, (ROWS, 4))
    scales[page, row] = rows[:, WIDTH:].to(pages.device)


def get(pages: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [N, 128] and scales [N, 1] float32."""
    page, row = slots // ROWS, slots % ROWS
    codes = pages[:, : ROWS * WIDTH].unflatten(1, (ROWS, WIDTH))[page, row]
    return codes, pages[:, ROWS * WIDTH :].unflatten(1, (ROWS, 4))[page, row].contiguous().view(torch.float32)


def judge_codes(step: Step, codes: Tensor, scales: Tensor, *, fused_store: bool) -> None:
    """Of the queries; and of the new tokens' keys, as they lie in the pages."""
    for x, found, scale in step.queries:
        assert_power_of_two(x, scale)
        wanted = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), "codes of a query differ from the rule"
    assert len(step.queries) == (1 if fused_store else 2) and step.keys is not None
    wanted, wanted_scales = exact(step.keys, None)
    if not fused_store:
        assert_power_of_two(step.keys, scales)
        wanted = (step.keys.float() / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    differ = (codes.int() - wanted.view(torch.uint8).int()).abs()
    if fused_store:  # amax / 448; times its reciprocal, so a code may be the neighbour
        torch.testing.assert_close(scales, wanted_scales, rtol=2**-22, atol=0)
        assert differ.max() <= 1 and differ.float().mean() < 2e-3, "codes of a key differ from the rule"
    else:
        assert not differ.any(), "codes of a key differ from the rule"


def assert_power_of_two(x: Tensor, scales: Tensor) -> None:
    """Of the rule; the next one is allowed where amax / 448 is a power of two, as a GPU's logarithm is not exact."""
    _, wanted = exact(x, "ue8m0")
    is_power = x.float().abs().amax(dim=-1, keepdim=True) == wanted * 448
    assert ((scales == wanted) | (is_power & (scales == 2 * wanted))).all(), "scales differ from the rule"


def judge_choice(step: Step, pages: Tensor, slots: Tensor, seen: list[int]) -> float:
    """Of the chosen positions, by scores in float64 of what lies in the pages. slots [T, positions], seen [T]."""
    assert step.weights is not None and step.chosen is not None and len(step.chosen) == len(seen)
    q, weights, worst = step.queries[0][1].double(), step.weights.double().view(-1, HEADS), 0.0
    for row, count in enumerate(seen):
        codes, scales = get(pages, slots[row, :count])
        score = (
            torch.relu(q[row] @ (codes.view(torch.float8_e4m3fn).double() * scales.double()).T) * weights[row, :, None]
        ).sum(0)
        chosen = step.chosen[row].long()
        chosen = chosen[chosen >= 0]
        width = min(count, step.chosen.shape[1])
        assert len(chosen) == len(chosen.unique()) == width and int(chosen.max()) < count, "not so many positions that are seen"
        best = score.topk(width)
        edge = float(best.values[-1])
        assert float(score[chosen].min()) >= edge - 2e-2 * (1 + abs(edge)), "a key of a lower score was chosen"
        worst = max(worst, 1 - float(torch.isin(best.indices, chosen).float().mean()))
    return worst
