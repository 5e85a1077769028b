# SPDX-License-Identifier: Apache-2.0
"""Some rows of attention over keys of each head, in float32: what shadow mode compares `forward_mha` with.

A token attends to what its layer selected, or to everything before it where its sequence is no longer than the top-k. Latent
rows of the step's own tokens come as vLLM gives them, those before them out of the cache; the layer's own `kv_b_proj` makes
keys and values of both, as in the implementation, and the rest is float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.layouts import layout_of

_ROWS: Final = 24
"""Of a step, spread over its tokens, beside the first and the last of some prompts."""
_PROMPTS: Final = 12


@dataclass(frozen=True)
class Prompts:
    """Requests of a step whose tokens go through `forward_mha`, on the host.

    Attributes:
        starts: of each request's tokens among those of all, and their number at the end. lengths: tokens of each sequence.
        block_table: [R, columns] int32, on the device.
    """

    starts: list[int]
    lengths: list[int]
    block_table: Tensor

    @classmethod
    def of(cls, common: Any, first: int) -> Prompts:
        """Those behind the `first` requests of vLLM's CommonAttentionMetadata. Waits for the device."""
        starts = common.query_start_loc_cpu[first : common.num_reqs + 1]
        lengths = common.seq_lens[first : common.num_reqs]
        return cls((starts - starts[0]).tolist(), lengths.tolist(), common.block_table_tensor[first:])

    def sampled(self) -> list[tuple[int, int]]:
        """(request, token), by token: the first and the last token of some requests, and others at equal distances."""
        tokens = self.starts[-1]
        several = range(0, len(self.lengths), -(-len(self.lengths) // _PROMPTS))
        chosen = {
            token for r in several if self.starts[r + 1] > self.starts[r] for token in (self.starts[r], self.starts[r + 1] - 1)
        }
        chosen |= {tokens * number // _ROWS for number in range(_ROWS)} if tokens else set()
        found: list[tuple[int, int]] = []
        request = 0
        for token in sorted(chosen):
            while token >= self.starts[request + 1]:
                request += 1
            found.append((request, token))
        return found


def decodes_of(common: Any, count: int) -> Any:
    """The first `count` requests of a step, which are all that goes through `forward_mqa` beside prompts."""
    starts = common.query_start_loc_cpu[: count + 1]
    part = common.unpadded(int(starts[-1]), count)
    lens = starts[1:] - starts[:-1]
    changes: dict[str, Any] = {"max_query_len": int(lens.max()) if count else 0}
    bound = getattr(common, "seq_lens_cpu_upper_bound", None)
    if "seq_lens_cpu_upper_bound" in {field.name for field in fields(part)} and bound is not None:  # 0.26 leaves it out
        changes["seq_lens_cpu_upper_bound"] = bound[:count]
    return replace(part, **changes)


@dataclass(frozen=True)
class PerHead:
    """A layer's attention over keys of each head.

    Attributes:
        project: latent rows [N, 512] -> [N, H * (nope + value)]. nope, value: widths. scale: of scores.
    """

    project: Callable[[Tensor], Any]
    nope: int
    value: int
    scale: float

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> PerHead | None:
        """From the arguments of an implementation; None where the layer gives no up-projection."""
        project = arguments.get("kv_b_proj")
        if project is None:
            return None
        return cls(project, arguments["qk_nope_head_dim"], arguments["v_head_dim"], float(arguments["scale"]))

    def rows(
        self, q: Tensor, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, topk_indices: Tensor, prompts: Prompts
    ) -> tuple[list[int], Tensor]:
        """Attention of some tokens.

        Args:
            q: [T, H, nope + rope]. kv_c: [T, 512]. k_pe: [T, 1, rope]. kv_cache: [blocks, block_size, ...].
            topk_indices: of the same tokens, [T, K] positions in the request, negative where there is none. Not read for
                sequences of at most K tokens: an indexer may leave those out.
        Returns: their numbers among the T, and [n, H, value] float32.
        """
        cache = kv_cache.view(torch.uint8) if kv_cache.element_size() == 1 else kv_cache
        layout, block_size = layout_of(cache), cache.shape[1]
        wanted: list[Tensor] = []
        sampled = prompts.sampled()
        for request, token in sampled:
            first, length = prompts.starts[request], prompts.lengths[request]
            new = prompts.starts[request + 1] - first
            position = length - new + token - first
            if length <= topk_indices.shape[1]:
                keys = torch.arange(position + 1, device=q.device)
            else:
                keys = topk_indices[token]
                keys = torch.unique(keys[(keys >= 0) & (keys <= position)]).long()
            before = keys[keys < length - new]
            blocks = prompts.block_table[request, before // block_size].long()
            latent, rope = layout.split(cache[blocks, before % block_size], q.dtype)
            own = first + keys[len(before) :] - (length - new)
            latent, rope = torch.cat([latent, kv_c[own]]), torch.cat([rope, k_pe.flatten(1)[own]])
            wanted.append(self._attend(q[token], latent, rope))
        return [token for _, token in sampled], torch.stack(wanted)

    def _attend(self, q: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        """q [H, nope + rope], latent [N, 512], rope [N, rope] -> [H, value] float32."""
        both = self.project(latent)[0].view(len(latent), len(q), self.nope + self.value)
        keys, values = both.float().split([self.nope, self.value], dim=-1)
        query, query_rope = q.float().split([self.nope, q.shape[1] - self.nope], dim=-1)
        scores = torch.einsum("hd,nhd->hn", query, keys) + query_rope @ rope.float().T
        return torch.einsum("hn,nhd->hd", (self.scale * scores).softmax(-1), values)
