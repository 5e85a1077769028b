# SPDX-License-Identifier: Apache-2.0
"""One call of sparse attention, then a layer of a model with a plan for each step. Runs on a CPU too, in a few seconds."""

import math

import numpy as np
import torch

import mla_portable as mp

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
mscale = 0.1 * math.log(40) + 1  # YaRN of DeepSeek-V3.2: rope_scaling.factor is 40
scale = 192**-0.5 * mscale**2  # 192 = 128 + 64 query dimensions before absorption; not 576

# One call: 4 query tokens of 16 heads, a BF16 cache of 64 blocks of 64 tokens, 2,048 cache slots for each query token.
q = torch.randn(4, 1, 16, 576, dtype=torch.bfloat16, device=device)
kv_cache = torch.randn(64, 64, 576, dtype=torch.bfloat16, device=device)
indices = torch.randint(64 * 64, (4, 1, 2048), dtype=torch.int32, device=device)
out, lse = mp.sparse_decode(q, kv_cache, indices, softmax_scale=scale)
print(mp.explain("sparse_decode", kv_layout="bf16", num_heads=16, topk=2048, block_size=64).text())

# A model's layer: a route is chosen and kernels are bound once; one plan per step serves all layers.
spec = mp.AttentionSpec(
    num_heads=16,
    kv_layout="bf16",
    block_size=64,
    topk=2048,
    softmax_scale=scale,
    max_num_tokens=256,
    max_num_reqs=16,
    max_model_len=4096,
)
attention = mp.SparseMLAAttention(spec, device=device)
planner = mp.Planner(attention.planner_config())
block_table = torch.arange(64, dtype=torch.int32, device=device).view(4, 16)  # 4 requests of 16 blocks
batch = mp.Batch(np.arange(5, dtype=np.int32), np.full(4, 1024, np.int32), block_table)  # 4 decodes, 1,024 tokens each
plan = planner.plan(batch)
topk_indices = torch.arange(2048, dtype=torch.int32, device=device).repeat(4, 1)  # positions; -1 is absent
topk_indices[topk_indices >= 1024] = -1
out, lse = attention.forward(q.flatten(0, 1), kv_cache, topk_indices, plan)
print(out.shape)
