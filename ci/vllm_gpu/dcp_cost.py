# SPDX-License-Identifier: Apache-2.0
"""What decode context parallelism (DCP) costs a decode step: times of a layer's pieces, on all GPUs of a group together.

    torchrun --nproc-per-node 2 ci/vllm_gpu/dcp_cost.py [--rows 16,64] [--contexts 4096,32768,131072]

DeepSeek-V3.2's dimensions, an FP8 cache, the plugin's indexer, vLLM's collectives and merges. With DCP 1 a GPU holds every
sequence and attends with its own heads; with DCP N it holds a share and attends with the heads of N GPUs. Whatever else a layer
does is the same in both. Each piece is timed as a CUDA graph over layers with caches of their own; the slowest GPU counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import mla_portable
from mla_portable.attention import AttentionSpec, SparseMLAAttention
from mla_portable.contracts import Batch, ContextShare
from mla_portable.layouts import INDEX_FP8, LAYOUTS
from mla_portable.planner import Planner
from mla_portable.tools.bench.timing import captured
from mla_portable.vllm.context_parallel import gather_from_ranks
from mla_portable.vllm.indexer import server_for

HEADS: Final = (16, 64)
"""Of a GPU: of the model's 128, eight GPUs have 16 each, two have 64."""
MODEL_LAYERS: Final = 61
LAYERS: Final = 4
"""With caches of their own, so that what one layer reads has left the L2 cache when it is read again."""
TOPK, INDEX_HEADS, BLOCK, KEY, VALUE = 2048, 64, 64, 576, 512
_CALLS, _ROUNDS = 3, 7
_FINITE: Final = 0xF7
"""Any byte and this one is a finite e4m3 number."""


def join_group() -> tuple[ContextShare, torch.device, Any]:
    """This process's share of sequences, its GPU, and vLLM's group, whose collectives engines use."""
    os.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"  # it wants NVLink multicast, which a node may have switched off
    from vllm.distributed import parallel_state

    size, rank, local = (int(os.environ[name]) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"))
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    parallel_state.set_custom_all_reduce(False)
    parallel_state.init_distributed_environment(size, rank, "env://", local)
    parallel_state.initialize_model_parallel(size, decode_context_model_parallel_size=size)
    return ContextShare(size, rank), device, parallel_state.get_dcp_group()


def pools(blocks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Caches of random tokens, [blocks, 64, 656] of attention and [blocks, 64, 132] of the indexer."""
    layout = LAYOUTS["fp8_ds_mla"]
    both = [torch.empty((blocks, BLOCK, each.row_width), dtype=torch.uint8, device=device) for each in (layout, INDEX_FP8)]
    for pool in both:
        pool.random_(0, 256).bitwise_and_(_FINITE)
    kv, index = both
    kv[..., layout.scale_offset : layout.rope_offset].view(torch.float32).fill_(0.01)
    kv[..., layout.rope_offset :].view(torch.bfloat16).normal_()
    index.view(blocks, -1)[:, BLOCK * 128 :].view(torch.float32).uniform_(0.5, 1.0)
    return kv, index


@dataclass(frozen=True)
class Side:
    """A decode step of `rows` sequences of `context` tokens as one GPU computes it, by pieces."""

    share: ContextShare
    heads: int
    rows: int
    context: int
    device: torch.device
    kv: Tensor
    index: Tensor

    def pieces(self, group: Any) -> dict[str, Callable[[int], object]]:
        """By name, what is done for a layer, given its number; `layer` is all of it."""
        share, rows, device = self.share, self.rows, self.device
        columns = -(-share.length(self.context) // BLOCK)
        blocks = rows * columns
        kv, index = (pool[: LAYERS * blocks].view(LAYERS, blocks, *pool.shape[1:]) for pool in (self.kv, self.index))
        table = torch.randperm(blocks, device=device).int().view(rows, columns)
        starts, lens = np.arange(rows + 1, dtype=np.int32), np.full(rows, self.context, dtype=np.int32)
        attention = self._attention()
        plan = Planner(attention.planner_config()).plan(Batch(starts, lens, table))
        server = server_for(index[0], INDEX_HEADS, TOPK, device, scale_format="ue8m0", share=share, reason="it is timed")

        q = torch.randn((rows, self.heads, KEY), dtype=torch.bfloat16, device=device)
        gathered = torch.randn((rows, self.heads * share.size, KEY), dtype=torch.bfloat16, device=device)
        out = torch.randn((rows, self.heads * share.size, VALUE), dtype=torch.bfloat16, device=device)
        lse = torch.zeros((rows, self.heads * share.size), device=device)
        index_q = torch.randn((rows, INDEX_HEADS, 128), device=device).to(torch.float8_e4m3fn)
        weights = torch.rand((rows, INDEX_HEADS), device=device)
        chosen, merged = (torch.full((rows, TOPK), -1, dtype=torch.int32, device=device) for _ in range(2))
        scores = torch.zeros((rows, TOPK), device=device)
        pages = torch.from_numpy(starts).to(device), torch.from_numpy(lens).to(device), table

        def select(layer: int, into: Tensor = chosen) -> None:
            own = {"scores_out": scores, **share.arguments} if share.size > 1 else {}
            server.select(index_q, weights, index[layer], *pages, topk=TOPK, out=into, **own)

        def attend(layer: int, query: Tensor = gathered) -> None:
            attention.forward(query, kv[layer], merged if share.size > 1 else chosen, plan, out=out, lse_out=lse)

        def alone(layer: int) -> None:
            select(layer)
            attend(layer)

        select(0)
        if share.size == 1:
            return {"select": select, "attend": attend, "layer": alone}

        def pick(layer: int) -> None:
            server.merge(scores, merged)

        def gather(layer: int) -> Tensor:
            return group.all_gather(q, dim=1)

        merges = _merges(out, lse, share.size, group)

        def whole(layer: int) -> None:
            select(layer, merged)
            pick(layer)
            attend(layer, gather(layer))
            merges["merge ag_rs"](layer)

        merged.copy_(chosen)
        pick(0)
        parts = {"select": select, "pick": pick, "gather q": gather, "attend": attend, **merges, "layer": whole}
        return {**parts, "of pick: gather": lambda layer: gather_from_ranks(scores)}

    def _attention(self) -> SparseMLAAttention:
        limits: dict[str, Any] = {"max_num_tokens": self.rows, "max_num_reqs": self.rows, "max_model_len": self.context}
        spec = AttentionSpec(
            self.heads * self.share.size, 192**-0.5, graph=True, concat_query=False, share=self.share, **limits
        )
        return SparseMLAAttention(spec, device=self.device)

    @property
    def received(self) -> int:
        """Bytes that a GPU receives for a layer: heads, outputs, log-sum-exps, candidates."""
        a_row = self.heads * 2 * (KEY + VALUE) + 4 * self.heads * self.share.size + 4 * TOPK
        return (self.share.size - 1) * self.rows * a_row


def _merges(out: Tensor, lse: Tensor, size: int, group: Any) -> dict[str, Callable[[int], object]]:
    """Ways to merge partial results [T, N * H, 512] of all ranks into [T, H, 512] of each."""
    from vllm.v1.attention.ops.common import cp_lse_ag_out_rs
    from vllm.v1.attention.ops.dcp_alltoall import dcp_a2a_lse_reduce

    def exchanged(tensor: Tensor) -> Tensor:
        sent = tensor.unflatten(1, (size, -1)).transpose(0, 1).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group.device_group)
        return received

    return {
        "merge ag_rs": lambda layer: cp_lse_ag_out_rs(out, lse, group),
        "merge a2a": lambda layer: dcp_a2a_lse_reduce(out, lse, group),
        "merge_states": lambda layer: mla_portable.merge_states(exchanged(out), exchanged(lse)),
    }


def timed(call: Callable[[int], object], device: torch.device) -> float:
    """Microseconds of a layer, on the slowest GPU."""

    def layers() -> None:
        for layer in range(LAYERS):
            call(layer)

    replay = captured(layers, device, calls=_CALLS)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    for _ in range(_ROUNDS):
        dist.barrier()
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (LAYERS * _CALLS))
    slowest = torch.tensor(statistics.median(times), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(each) for each in text.split(",")]

    from vllm.config import VllmConfig, set_current_vllm_config

    parser = argparse.ArgumentParser(description="What decode context parallelism costs a decode step.")
    parser.add_argument("--rows", type=numbers, default=[16, 64], help="sequences of the step")
    parser.add_argument("--contexts", type=numbers, default=[4096, 32_768, 131_072], help="tokens of each sequence")
    args = parser.parse_args()
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        share, device, group = join_group()
        kv, index = pools(LAYERS * max(args.rows) * -(-max(args.contexts) // BLOCK), device)
        head = True
        for heads in HEADS:
            for rows in args.rows:
                for context in args.contexts:
                    both = [Side(each, heads, rows, context, device, kv, index) for each in (ContextShare(), share)]
                    times = [{name: timed(call, device) for name, call in each.pieces(group).items()} for each in both]
                    if share.rank == 0 and head:
                        print(f"us a layer, DCP 1 | DCP {share.size}; saved: ms a step of {MODEL_LAYERS} layers", flush=True)
                        names = " ".join(f"{name:>15}" for name in (*times[0], *times[1]))
                        print(f"{'heads':>5} {'rows':>4} {'context':>7} {names} {'kB':>7} {'saved':>7}", flush=True)
                    head = False
                    saved = (times[0]["layer"] - times[1]["layer"]) * MODEL_LAYERS / 1e3
                    cells = " ".join(f"{time:15.1f}" for each in times for time in each.values())
                    if share.rank == 0:
                        print(f"{heads:5} {rows:4} {context:7} {cells} {both[1].received / 1e3:7.0f} {saved:7.2f}", flush=True)
    dist.barrier()
    os._exit(0)  # groups may take long to end


if __name__ == "__main__":
    main()
