# SPDX-License-Identifier: Apache-2.0
# pyright: basic
"""Which layers attend to one selection: those without an indexer to that of the last layer before them that has one.

So do GLM-5.2 and later, hy_v4 and Mistral Large 4. Slots are converted by the first layer of such a group, and read again by
the others: the layers are known when the model is built, in the order in which it runs them. vLLM 0.30 and later have a group
object for its own backends (`SparseMLAIndexGroup`), with memory and a stream for each group; it says the same, and is unused.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

_PARTS: Final = (
    *("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len"),
    *("query_start_loc", "query_start_loc_cpu", "seq_lens", "block_table_tensor", "slot_mapping"),
)


def leaders(vllm_config: Any) -> dict[Any, Any]:
    """Each implementation of ours whose layer attends to an earlier layer's selection -> that of the first layer that does.

    A layer without an indexer that no layer of ours is in front of, as on a later pipeline stage, leads those behind it.
    """
    latest: dict[int, Any] = {}
    found: dict[Any, Any] = {}
    for layer in vllm_config.compilation_config.static_forward_context.values():
        impl: Any = getattr(layer, "impl", None)
        if not hasattr(impl, "attach"):
            if getattr(layer, "indexer", None) is not None:  # another backend's, which selects into nobody knows which buffer
                latest.clear()
            continue
        buffer = id(impl.topk_indices_buffer)
        if impl.has_indexer or buffer not in latest:
            latest[buffer] = impl
        else:
            found[impl] = latest[buffer]
    return found


class Described:
    """A step as vLLM describes it to a builder, in a CommonAttentionMetadata that the steps of a draft change in place."""

    def __init__(self, common: Any) -> None:
        self._common, self._parts = common, _parts(common)

    def is_step(self, common: Any) -> bool:
        """The same object, and it describes the same step still."""
        return common is self._common and all(map(_is_same, self._parts, _parts(common)))


def _parts(common: Any) -> list[Any]:
    return [getattr(common, name) for name in _PARTS]


def _is_same(before: Any, now: Any) -> bool:
    return before is now or (not isinstance(before, Tensor) and before == now)
