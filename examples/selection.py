# SPDX-License-Identifier: Apache-2.0
"""How much of attention a selection keeps: the indexer, other rules, and your own, beside attention to all keys.

For a study of selections (`RULES`). It needs no GPU: plain torch computes it on a CPU, in some seconds. Keys are invented: each
query has a few that it looks for, the others are noise. Replace `problem` by tensors of a model.
"""

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import mla_portable as mp

HEADS, BLOCK = 8, 64
SCALE = 192**-0.5


class Problem(NamedTuple):
    """One request. N positions are cached, and T query tokens are its last.

    q [T, HEADS, 576] and kv [N, 576] bfloat16, with the latent in the first 512 columns. index_q [T, 4, 128], index_k [N, 128]
    bfloat16, weights [T, 4] float32: what the indexer scores with.
    """

    q: Tensor
    kv: Tensor
    index_q: Tensor
    index_k: Tensor
    weights: Tensor


def problem(tokens: int, context: int, noise: float) -> Problem:
    """Queries that look for 32 keys each. `noise` is that of the indexer's keys and queries, in units of their size."""
    torch.manual_seed(0)
    kv = torch.randn(context, 576)
    wanted = torch.randint(context - tokens, (tokens, 32))  # of each query token
    common = kv[wanted].mean(dim=1)  # [T, 576]
    q = 6 * common[:, None] + torch.randn(tokens, HEADS, 576)
    project = torch.randn(576, 128) / 576**0.5
    index_k = kv @ project
    index_q = (6 * common @ project)[:, None].expand(-1, 4, -1)
    index_k = index_k + noise * torch.randn_like(index_k)
    index_q = index_q + noise * torch.randn(tokens, 4, 128)
    halves = (each.bfloat16() for each in (q, kv, index_q, index_k))
    return Problem(*halves, torch.ones(tokens, 4))


def seen(given: Problem) -> Tensor:
    """[T, N]: may token t attend to position n? The last T positions are the query tokens' own."""
    tokens, context = len(given.q), len(given.kv)
    return torch.arange(context) <= torch.arange(context - tokens, context)[:, None]


def indexer(given: Problem, topk: int) -> Tensor:
    """What the primitive selects by its scores: sum over heads of weights * relu(q.k)."""
    blocks = len(given.kv) // BLOCK
    cache = given.index_k.view(blocks, BLOCK, 128)
    starts = torch.tensor([0, len(given.q)], dtype=torch.int32)
    lengths = torch.tensor([len(given.kv)], dtype=torch.int32)
    table = torch.arange(blocks, dtype=torch.int32)[None]
    return mp.indexer_select(given.index_q.contiguous(), given.weights, cache, starts, lengths, table, topk=topk)


def best(given: Problem, topk: int) -> Tensor:
    """The keys with the largest sum over heads of the probabilities: no indexer can keep much more."""
    scores = torch.einsum("thd,nd->thn", given.q.float(), given.kv.float()) * SCALE
    scores = scores.masked_fill(~seen(given)[:, None], -torch.inf)
    return scores.softmax(dim=-1).sum(dim=1).topk(topk).indices.int()


def recent(given: Problem, topk: int) -> Tensor:
    """The last K positions."""
    last = torch.arange(len(given.kv) - len(given.q), len(given.kv))[:, None]
    return (last - torch.arange(topk)).int()  # negative = absent


RULES: dict[str, Callable[[Problem, int], Tensor]] = {"indexer": indexer, "best": best, "recent": recent}
"""Positions [T, K] int32 that each token attends to; negative = absent. Add yours."""


def attend(given: Problem, positions: Tensor) -> tuple[Tensor, Tensor]:
    """(out [T, HEADS, 512] bfloat16, lse [T, HEADS]) over these positions, which are slots where a request is alone."""
    cache = given.kv.view(-1, BLOCK, 576)
    out, lse = mp.sparse_decode(given.q[:, None], cache, positions[:, None].contiguous(), softmax_scale=SCALE)
    return out[:, 0], lse[:, 0]


def main() -> None:
    """Print a line for each K and rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--context", type=int, default=2048, help="cached positions, a multiple of 64")
    parser.add_argument("--noise", type=float, default=0.3, help="of the indexer")
    options = parser.parse_args()
    given = problem(options.tokens, options.context, options.noise)
    everything = torch.where(seen(given), torch.arange(options.context), -1).int()
    out, lse = attend(given, everything)
    print(f"{'rule':>10} {'K':>6} {'mass kept':>10} {'error of out':>13}")
    for topk in (32, 128, 512):
        for name, rule in RULES.items():
            some, part = attend(given, rule(given, topk))
            mass = (part - lse).exp().mean().item()  # of the softmax over all keys
            error = ((some.float() - out.float()).norm() / out.float().norm()).item()
            print(f"{name:>10} {topk:>6} {mass:>10.3f} {error:>13.3f}")


if __name__ == "__main__":
    main()
