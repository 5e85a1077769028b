# SPDX-License-Identifier: Apache-2.0
"""What the indexer of a running engine selects, judged by the logits of its own inputs, and against another engine's.

The indexer's module is watched in steps that run eagerly. Of some tokens of each step its logits are computed again in
float64, from the queries, the weights and the bytes of the cache that it was given. A selection is right if every token left
out has a logit that exceeds the smallest selected one by NEAR at most. Engines run the same prompts together in the same
steps, so the row of a step names the same token in all.

`Capture` keeps what a trained model's indexer selects for runs of tokens instead, as the file that benchmarks read:

    capture = Capture(model, name="GLM-5", made="prompts of ..., vLLM 0.26, FP8")   # the module, before the prompts
    ...                                                                             # eager: --enforce-eager
    print(capture.end(Path("glm.npz")))
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import torch
from torch import Tensor

NEAR: Final = 1e-3
"""Of a row's largest logit: as far apart as two logits may be that an accurate indexer takes one for the other."""
ALIKE: Final = 0.05
"""Of a row's largest logit: as much may the first layer's logits of two engines differ. Their queries are rounded to e4m3."""

_ROWS: Final = 8
"""Tokens of a chunk of prefill that are looked at, and of a step's decodes."""
_WIDTH, _SCALE_BYTES = 128, 4
_DIRECT: Final = "vllm.models.deepseek_v32.attention"
"""From 0.28 on: on CUDA this model calls the function `sparse_attn_indexer`, not the layer around it."""


@dataclass(frozen=True)
class Row:
    """A token's selection. logits: [n] float32, of all positions that it sees. chosen: positions. decode: not of a prompt."""

    logits: Tensor
    chosen: Tensor
    topk: int
    decode: bool

    def wrong(self) -> float:
        """How far beyond the exact selection's edge a position was taken or left out, relative; inf for no selection at all."""
        count, taken = len(self.logits), len(self.chosen)
        distinct = taken == len(self.chosen.unique()) == min(count, self.topk)
        if not distinct or (taken and not 0 <= int(self.chosen.min()) <= int(self.chosen.max()) < count):
            return math.inf
        if count <= self.topk:
            return 0.0
        left = torch.ones(count, dtype=torch.bool)
        left[self.chosen] = False
        apart = float(self.logits[left].max() - self.logits[self.chosen].min())
        return max(0.0, apart) / self._size() if math.isfinite(apart) else math.inf

    def apart(self, other: Row) -> float:
        """The largest difference of two rows' logits, relative."""
        return float((self.logits - other.logits).abs().max()) / self._size()

    def differing(self, other: Row) -> int:
        """Positions that one selects and the other does not."""
        return len(self.chosen) - int(torch.isin(self.chosen, other.chosen).sum())

    def _size(self) -> float:
        return float(self.logits.abs().max().clamp(min=1e-30))


Rows = dict[tuple[int, int, int], Row]
"""By step, layer and the token's row in the step."""


def exact_logits(query: Tensor, weights: Tensor, cache: Tensor, blocks: Tensor, count: int) -> Tensor:
    """[count] float64: sum over heads of weight * relu(query . key).

    Args:
        query: [H, 128] e4m3 or bf16. weights: [H]. blocks: of the token's request, in order. count: positions that it sees.
        cache: uint8 [blocks, block_size, 132]: a page is block_size * 128 e4m3 bytes, then block_size float32 scales.
    """
    return weights.double() @ (query.double() @ keys_of(cache, blocks, count).T).relu()


def keys_of(cache: Tensor, blocks: Tensor, count: int) -> Tensor:
    """[count, 128] float64, the first keys of a request; arguments as of `exact_logits`."""
    block_size = cache.shape[1]
    pages = cache[blocks[: -(-count // block_size)].long()].flatten(1)  # [pages, block_size * 132]
    values, scales = pages.split([block_size * _WIDTH, block_size * _SCALE_BYTES], dim=1)
    keys = values.contiguous().view(torch.float8_e4m3fn).view(-1, _WIDTH).double()
    return (keys * scales.contiguous().view(torch.float32).view(-1, 1).double())[:count]


def _sampled(count: int) -> list[int]:
    """Up to _ROWS of `count` rows, evenly spaced, the last one among them."""
    return [count - 1 - number * count // _ROWS for number in range(_ROWS)] if count > _ROWS else list(range(count))


def _seen(metadata: Any) -> Iterator[tuple[int, Tensor, int, bool]]:
    """(row in the step, its request's blocks, positions it sees, whether it is a decode) of the rows that are looked at."""
    for chunk in metadata.prefill.chunks if metadata.num_prefills else ():
        for row in _sampled(chunk.token_end - chunk.token_start):
            start, end = int(chunk.cu_seqlen_ks[row]), int(chunk.cu_seqlen_ke[row])
            request = int(torch.searchsorted(chunk.cu_seq_lens, start, right=True)) - 1
            yield chunk.token_start + row, chunk.block_table[request], end - start, False
    if metadata.num_decodes:
        lengths = metadata.decode.seq_lens.flatten()
        for row in _sampled(metadata.num_decode_tokens):
            yield row, metadata.decode.block_table[row], int(lengths[row]), True


class Watch:
    """Looks at the selections of an engine in this process, from when it is made until `end`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.rows: Rows = {}
        self.failure = ""
        found = [each for each in model.modules() if "SparseAttnIndexer" in {base.__name__ for base in type(each).__mro__}]
        self._layers = [cast(Any, each).k_cache.prefix for each in found]
        self._steps = [0] * len(found)
        self._hooks = [each.register_forward_hook(self._look_at_module) for each in found]
        self._direct: Any = sys.modules.get(_DIRECT)
        if self._direct is not None:
            self._operator = self._direct.sparse_attn_indexer
            self._direct.sparse_attn_indexer = self._watched

    def _look_at_module(self, indexer: Any, given: tuple[Any, ...], selected: Any) -> None:
        _, queries, _, weights = given
        self._look(indexer.k_cache, queries, weights, indexer.topk_tokens, indexer.topk_indices_buffer)

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        """The operator, for a model that calls it without its module."""
        selected = self._operator(*args, **kwargs)
        _, prefix, kv_cache, queries, _, _, weights, _, _, topk, _, _, _, buffer = args
        self._look(SimpleNamespace(prefix=prefix, kv_cache=kv_cache), queries, weights, topk, buffer)
        return selected

    def _look(self, cache: Any, queries: Tensor, weights: Tensor, topk: int, selected: Tensor) -> None:
        """A failure is kept for the judge: the engine goes on."""
        if self.failure:
            return
        try:
            self._add(cache, queries, weights, topk, selected)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"

    def _add(self, cache: Any, queries: Tensor, weights: Tensor, topk: int, selected: Tensor) -> None:
        from vllm.forward_context import get_forward_context

        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict) or (queries.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        layer = self._layers.index(cache.prefix)
        step = self._steps[layer]
        self._steps[layer] += 1
        self._keep(step, layer, metadata[cache.prefix], cache, (queries, weights, topk, selected))

    def _keep(self, step: int, layer: int, metadata: Any, cache: Any, given: tuple[Tensor, Tensor, int, Tensor]) -> None:
        """What is kept of a layer's step. given: queries, weights, top-k and what was selected."""
        queries, weights, topk, selected = given
        for row, blocks, count, decode in _seen(metadata):
            logits = exact_logits(queries[row], weights[row], cache.kv_cache, blocks, count)
            chosen = selected[row, :topk]
            chosen = chosen[chosen >= 0].long().cpu()
            self.rows[step, layer, row] = Row(logits.float().cpu(), chosen, topk, decode)

    def _stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._direct is not None:
            self._direct.sparse_attn_indexer = self._operator

    def end(self, file: Path) -> str:
        """Stop, write the rows; what failed."""
        self._stop()
        kept = {key: (row.logits, row.chosen.int(), row.topk, row.decode) for key, row in self.rows.items()}
        torch.save(kept, file)
        return self.failure


class Capture(Watch):
    """Keeps the selections of prompts' tokens, and of the longest run the indexer's inputs, until `end` writes them.

    Of each request in a step the last tokens are kept, in all layers, where they see more keys than are selected.
    """

    def __init__(self, model: torch.nn.Module, *, name: str, made: str, rows: int = 256, input_rows: int = 64) -> None:
        """name: the model's. made: from what text, and how. rows: tokens of a run, of which the inputs of the last are kept."""
        super().__init__(model)
        self._name, self._made, self._most, self._input_rows = name, made, rows, input_rows
        self._runs: dict[tuple[int, int], dict[int, Tensor]] = {}
        """By step and first row: [rows, K] int32 of each layer."""
        self._sees: dict[tuple[int, int], Tensor] = {}
        self._inputs: dict[tuple[int, int], dict[int, tuple[Tensor, Tensor, Tensor]]] = {}

    def _keep(self, step: int, layer: int, metadata: Any, cache: Any, given: tuple[Tensor, Tensor, int, Tensor]) -> None:
        queries, weights, topk, selected = given
        for chunk in metadata.prefill.chunks if metadata.num_prefills else ():
            starts, ends = chunk.cu_seqlen_ks.cpu(), chunk.cu_seqlen_ke.cpu()
            firsts = [0, *(torch.nonzero(starts.diff()).flatten() + 1).tolist(), len(starts)]
            for begin, end in pairwise(firsts):
                begin = max(begin, end - self._most)
                seen = (ends - starts)[begin:end]
                if int(seen[-1]) <= topk:
                    continue
                run, rows = (step, chunk.token_start + begin), slice(chunk.token_start + begin, chunk.token_start + end)
                lists = selected[rows, :topk].cpu()
                order = (lists < 0).to(torch.int8).sort(dim=1, stable=True).indices  # absent ones last
                self._runs.setdefault(run, {})[layer] = lists.gather(1, order)
                self._sees[run] = seen
                if all(int(seen[-1]) >= int(self._sees[other][-1]) for other in self._inputs):
                    request = int(torch.searchsorted(chunk.cu_seq_lens.cpu(), starts[begin], right=True)) - 1
                    last = slice(max(rows.start, rows.stop - self._input_rows), rows.stop)
                    keys = keys_of(cache.kv_cache, chunk.block_table[request], int(seen[-1])).bfloat16().cpu()
                    inputs = keys, queries[last].bfloat16().cpu(), weights[last].float().cpu()
                    self._inputs = {run: {**self._inputs.get(run, {}), layer: inputs}}

    def end(self, file: Path) -> str:
        """Stop, write the file, a .npz; what failed."""
        from mla_portable.judge.problems.selections import IndexSample, write_selections  # not in an engine without the project

        self._stop()
        layers = range(len(self._layers))
        runs = [run for run, lists in self._runs.items() if lists.keys() >= {*layers}]
        if self.failure or not runs:
            return self.failure or "no prompt saw more keys than are selected"
        index = None
        for run, inputs in self._inputs.items():
            if inputs.keys() >= {*layers}:
                keys, queries, weights = (torch.stack([inputs[layer][part] for layer in layers]) for part in range(3))
                seen = self._sees[run][-queries.shape[1] :].numpy()
                index = IndexSample(torch.arange(len(layers)).numpy(), keys, queries, weights, seen)
        write_selections(
            file,
            torch.stack([torch.cat([self._runs[run][layer] for run in runs]) for layer in layers]),
            torch.cat([self._sees[run] for run in runs]),
            model=self._name,
            made=self._made,
            request=torch.cat([torch.full((len(self._sees[run]),), at) for at, run in enumerate(runs)]),
            index=index,
        )
        return ""


def read(file: Path) -> Rows:
    """The rows that an engine left, {} where it left none."""
    kept = torch.load(file) if file.exists() else {}
    return {key: Row(logits, chosen.long(), topk, decode) for key, (logits, chosen, topk, decode) in kept.items()}


def judge(ours: Rows, stock: Rows | None) -> tuple[bool, str]:
    """Whether selections are right, and those of prompts stock's but for near-ties; what was found. None: without stock."""
    if not ours:
        return False, "no selection was seen"
    wrong = max(row.wrong() for row in ours.values())
    long = [row for row in ours.values() if len(row.logits) > row.topk]
    right = wrong <= NEAR and bool(long)
    text = f"{len(ours)} selections, {len(long)} of more keys than top-k, off by {wrong:.1e} of a logit"
    if stock is None:
        return right, text
    alike = [(key[1], row, stock[key]) for key, row in ours.items() if not row.decode and key in stock]
    alike = [(layer, row, other) for layer, row, other in alike if len(row.logits) == len(other.logits)]
    first = max((row.apart(other) for layer, row, other in alike if layer == 0), default=math.inf)
    differing, chosen = (
        sum(each) for each in zip((0, 0), *((a.differing(b), len(a.chosen)) for _, a, b in alike), strict=True)
    )
    text += f"; against stock's {differing} of {chosen} positions of {len(alike)} differ, logits of layer 0 by {first:.1e}"
    return right and first <= ALIKE, text
