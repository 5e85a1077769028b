# SPDX-License-Identifier: Apache-2.0
"""What a Batch must be before it is planned: whole-array checks that cost microseconds, with errors that name both sides."""

from __future__ import annotations

from typing import Final, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mla_portable.contracts import Batch, InvalidArgument
from mla_portable.contracts.values import describe
from mla_portable.planner.config import PlannerConfig

_WHERE: Final = "Planner.plan"
_INT32: Final = np.dtype(np.int32)
_largest, _or = np.maximum.reduce, np.bitwise_or.reduce
"""`ndarray.max` and the like without their detours through Python."""


class Sizes(NamedTuple):
    """num_reqs R, num_tokens T, num_padded_tokens of a batch."""

    num_reqs: int
    num_tokens: int
    num_padded_tokens: int


def check_sizes(batch: Batch, config: PlannerConfig, device: torch.device) -> Sizes:
    """Types, shapes, devices and totals. Raises: InvalidArgument."""
    if not isinstance(batch, Batch):  # pyright: ignore[reportUnnecessaryIsInstance]
        _refuse("batch", describe(batch), "a mla_portable.contracts.Batch")
    starts, seq_lens = batch.query_start_loc, batch.seq_lens
    _check_host("query_start_loc", starts, "[R + 1]")
    _check_host("seq_lens", seq_lens, "[R]")
    if starts.shape[0] < 1 or seq_lens.shape[0] != starts.shape[0] - 1:
        expected = f"one entry per request, {starts.shape[0] - 1}: query_start_loc has shape {list(starts.shape)}"
        _refuse("seq_lens", f"shape {list(seq_lens.shape)}", expected)
    num_reqs = seq_lens.shape[0]
    if num_reqs > config.max_num_reqs:
        _refuse("seq_lens", f"{num_reqs} requests", f"at most max_num_reqs ({config.max_num_reqs})", "Raise max_num_reqs.")
    if starts[0] != 0:
        _refuse("query_start_loc", f"first entry {starts[0]}", "0")
    num_tokens = int(starts[-1])
    if not 0 <= num_tokens <= config.max_num_tokens:
        expected = f"0 to max_num_tokens ({config.max_num_tokens})"
        _refuse("query_start_loc", f"last entry {num_tokens}", expected, "Raise max_num_tokens, or split the batch.")
    padded = batch.num_padded_tokens
    if padded is None:
        padded = num_tokens
    elif type(padded) is not int or not num_tokens <= padded <= config.max_num_tokens:
        expected = f"the batch's {num_tokens} tokens to max_num_tokens ({config.max_num_tokens}), an integer"
        _refuse("num_padded_tokens", describe(padded), expected)
    _check_device("block_table", batch.block_table, 2, "[R, columns]", num_reqs, device)
    if batch.seq_lens_device is not None:
        _check_device("seq_lens_device", batch.seq_lens_device, 1, "[R]", num_reqs, device)
    return Sizes(num_reqs, num_tokens, padded)


def check_lengths(
    query_lens: npt.NDArray[np.int32] | int,
    seq_lens: npt.NDArray[np.int32],
    num_tokens: int,
    max_model_len: int,
    table_tokens: int,
) -> None:
    """Every query length in [0, num_tokens], every sequence length in [its query length, max_model_len].

    Args:
        query_lens: [R], R >= 1, or one length that all share, known to be in range. seq_lens: [R].
        table_tokens: tokens that a row of the block table holds, the limit for requests that have query tokens.
    Raises: InvalidArgument, naming the first request at fault.
    """
    # Seen as unsigned, whatever is negative exceeds every limit: one pass finds both ends of a range.
    if not isinstance(query_lens, int) and int(_largest(query_lens.view(np.uint32))) > num_tokens:
        first = int((query_lens.view(np.uint32) > num_tokens).argmax())
        got = f"{int(query_lens[first])} query tokens for request {first}"
        _refuse("query_start_loc", got, f"non-decreasing entries up to the last one, {num_tokens}")
    # The sign of either difference tells; a length so far below zero that one wraps around leaves it in the other.
    longest = min(max_model_len, table_tokens)
    if int(_or((seq_lens - query_lens) | (longest - seq_lens))) < 0:
        wrong = (seq_lens < query_lens) | (seq_lens > max_model_len)
        if not wrong.any():
            check_table(_WHERE, "seq_lens", np.where(np.asarray(query_lens) > 0, seq_lens, 0), table_tokens)
            return
        first = int(wrong.argmax())
        least = query_lens if isinstance(query_lens, int) else int(query_lens[first])
        _refuse(
            "seq_lens",
            f"{int(seq_lens[first])} for request {first}",
            f"its {least} query tokens to max_model_len ({max_model_len})",
            "A sequence counts its context and its query tokens.",
        )


def check_table(where: str, argument: str, lengths: npt.NDArray[np.int32], table_tokens: int) -> None:
    """The block table names a block for every token of a request that the cache holds.

    Args:
        argument: what has the lengths, for messages. lengths: [R], such tokens. table_tokens: that a row of the block table
            holds.
    Raises: InvalidArgument, naming the first request at fault.
    """
    if lengths.max(initial=0) > table_tokens:
        first = int((lengths > table_tokens).argmax())
        got = f"{int(lengths[first])} for request {first}"
        expected = f"at most {table_tokens}, the tokens that a row of the block table holds"
        raise InvalidArgument(where, argument, got=got, expected=expected, remedy="Give a block table with more columns.")


def _check_host(name: str, value: object, shape: str) -> None:
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
        _refuse(name, type(value).__name__, f"a numpy array {shape} of int32 on the host")
    if value.dtype != _INT32 or value.ndim != 1:
        _refuse(name, f"{value.dtype} of shape {list(value.shape)}", f"int32 {shape}")


def _check_device(name: str, value: object, ndim: int, shape: str, num_reqs: int, device: torch.device) -> None:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        _refuse(name, type(value).__name__, f"a dense tensor {shape} of int32 on {device}")
    if value.dtype != torch.int32 or value.ndim != ndim or value.shape[0] < num_reqs:
        got = f"{value.dtype} of shape {list(value.shape)}"
        _refuse(name, got, f"torch.int32 {shape} with at least {num_reqs} rows, one per request")
    if value.device != device:
        _refuse(name, f"a tensor on {value.device}", f"the planner's device, {device}")
    if value.stride(-1) != 1 and value.shape[-1] > 1:
        _refuse(
            name, f"strides {list(value.stride())}", f"{shape} whose last dimension is contiguous", f"Pass {name}.contiguous()."
        )


def _refuse(argument: str, got: object, expected: str, remedy: str = "") -> NoReturn:
    raise InvalidArgument(_WHERE, argument, got=got, expected=expected, remedy=remedy)
