# SPDX-License-Identifier: Apache-2.0
"""Features: what a call may need and an implementation may lack. Promises: what a caller may say of its calls.

Each is written here once. A Request has all of them, Support has the features. Reasons against an implementation, their
remedies, and the options and defaults of `mla-portable explain` follow from `fields()`. Nothing here needs torch, because the
command line reads it before torch is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _flag(words: str = "", remedy: str = "") -> Any:
    """A field that is False where nothing is said.

    Args:
        words: what it says of a call, for the command line; "" where no implementation declares it.
        remedy: for a caller whose call needs what an implementation lacks.
    """
    return field(default=False, metadata={"words": words, "remedy": remedy})


@dataclass(frozen=True, kw_only=True)
class Features:
    """In a Request: the call needs this. In Support: it is there.

    Attributes:
        lse: the call returns the lse. Without it the implementation may skip the lse: `lse_out` is scratch, and the second
            result may be NaN or a tensor without elements. Any other value in it is the lse.
        attn_sink, lengths: the call has this argument.
        nope: queries are as wide as the latent, and the rotary part of the rows, quantised ones that have one, is not read.
        q_scale: queries are e4m3 and count `q_scale` times.
        compact, prefill_workspace: convert_indices moves valid indices to the front, and maps prefills to workspace rows.
        selection: masked_prefill has a bit mask of the selected keys.
        seq_lens: convert_indices has `seq_lens`, which limits positions to those that are cached.
        context_parallel: the cache holds one rank's share of each sequence (`ContextShare`), of several ranks.
        batch_invariant: a row's result may not depend, in a single bit, on the other rows: the bound implementation computes it
            in the same way for every `rows`, and a schedule cuts every batch in the same way (`PlannerConfig.batch_invariant`).
        ordered: chosen positions (topk_select, indexer_select) ascend. Otherwise they may have any order, another one in each
            call, the valid ones in front of -1.
        graph: the call is going to be captured in a CUDA graph.
    """

    __slots__ = ()

    lse: bool = _flag("The call returns the log-sum-exp.")
    attn_sink: bool = _flag("There is an attention sink for each head.")
    lengths: bool = _flag("`lengths` says how many indices of each row count.")
    nope: bool = _flag(
        "Queries have no rotary part, the rows of the cache have one.",
        remedy="pad the queries with zeros to the width of a key",
    )
    q_scale: bool = _flag(
        "Queries are e4m3 and have a scale.",
        remedy="multiply the queries by their scale, to bfloat16, before the call",
    )
    compact: bool = _flag("convert_indices moves the valid indices of a row to its front.")
    prefill_workspace: bool = _flag("convert_indices maps the rows of prefills to a workspace.")
    selection: bool = _flag("masked_prefill has a bit mask of the selected keys.")
    seq_lens: bool = _flag(
        "convert_indices leaves out positions from a request's length on.",
        remedy="set positions from a request's length on to -1 before the call",
    )
    context_parallel: bool = _flag(
        "The cache holds one rank's share of each sequence.",
        remedy="keep each sequence whole on one rank: a context parallel size of 1",
    )
    batch_invariant: bool = _flag(
        "Results must not depend on the other rows of the batch.",
        remedy="allow that the other rows of a batch change the order of a row's sums",
    )
    ordered: bool = _flag(
        "Chosen positions ascend.",
        remedy="pass ordered=False where nothing depends on the order, as attention does not",
    )
    graph: bool = _flag("The call is captured in a CUDA graph.")


@dataclass(frozen=True, kw_only=True)
class Promises:
    """In a Request: what the caller says of the values and of the stream. A broken promise is not detected.

    A promise saves work and never decides what can run, but for an implementation that needs it: `Support.needs_finite_values`,
    `needs_uniform_query_len` and `needs_whole_tables`.

    Attributes:
        clean_indices: about the values of `indices`: each is -1 or a slot of the cache (a row of kv), and what stands past a
            row's length, which is 0 to K, is -1, so that `lengths` only repeats it. Violating this promise can read
            out-of-bounds memory.
        clean_lengths: likewise of `lengths`: each is 0 to K, and no index in front of it is negative: they count compacted
            indices.
        finite_values: about `k` and `v`: no row of them holds NaN or infinity, those of no request and of other requests
            included. What needs it (`Support.needs_finite_values`) multiplies rows behind a request's end by 0, and runs under
            this promise alone. Where it is broken, results of neighbouring requests become NaN.
        follows_in_order: about the stream: the kernel in front of each call ends after all that is before it in the stream, as
            one that is launched normally does (`Support.ends_in_order`). A kernel that waits for it may then start before its
            end (CUDA's programmatic dependent launch). Where the promise is broken, a call may read what is not written yet, or
            overwrite what is still read.
        uniform_query_len: about `query_start_loc` of indexer_logits: each of the R requests has T / R of the T tokens, so that
            request r starts at token r * T / R. What needs it (`Support.needs_uniform_query_len`) takes T / R from the shapes.
        whole_tables: about `block_table` of the indexer: each of a request's entries below its length, clamped as the primitive
            clamps it, names a block of the cache. What needs it (`Support.needs_whole_tables`) chooses among positions of which
            no score can be taken back. Violating this promise can read out-of-bounds memory.
    """

    __slots__ = ()

    clean_indices: bool = _flag()
    clean_lengths: bool = _flag()
    finite_values: bool = _flag("The caller promises that no key or value is NaN or infinite.")
    follows_in_order: bool = _flag()
    uniform_query_len: bool = _flag("The caller promises that all requests have the same number of query tokens.")
    whole_tables: bool = _flag("The caller promises that each table entry below a request's length names a block of the cache.")
