# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's scores of the DSA indexer under one signature, and how a build's convention is recognised: by names, not versions.

build                              columns of gathered keys
April 2026, vLLM 0.24 to 0.31      absolute; `clean_logits` is taken
vLLM 0.33                          from the row's first key; it is not

Both have fp8_fp4_(paged_)mqa_logits, whose queries are a pair (tensor, None).
Sources: DeepGEMM 54e2261 and 891d57b, csrc/apis/attention.hpp; vLLM 0.26.0 and 0.33.0, vllm/third_party/deep_gemm.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from mla_portable.contracts import Primitive
from mla_portable.layouts import INDEX_FP8, INDEX_HEAD_SIZE
from mla_portable.primitives import INDEXER_LOGITS_RAGGED
from mla_portable_common.deep_gemm.pages import PAGE
from mla_portable_common.libraries import REFUSING, NotThisConvention, refused

_RAGGED: Final = ["q", "kv", "weights", "cu_seq_len_k_start", "cu_seq_len_k_end"]
_PAGED: Final = ["q", "kv_cache", "weights", "context_lens", "block_table", "schedule_meta", "max_context_len"]
_HEADS: Final = 64


def _parameters(function: Callable[..., Any]) -> list[str]:
    """Names of parameters; those of a pybind11 function stand in the first line of its docstring."""
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return re.findall(r"[(,] ?(\w+): ", (function.__doc__ or "").partition("\n")[0])


class Scores(Protocol):
    """A build's three functions. No call synchronises; the first of a shape class compiles a kernel.

    Attributes:
        relative: column 0 of `ragged` is a row's first key; else it is key 0.
    """

    relative: bool

    def num_sms(self) -> int:
        """Multiprocessors that `schedule` deals rows out to."""
        ...

    def schedule(self, lens: Tensor) -> Tensor:
        """How `paged` deals rows of these lengths, [B, S] int32, out to the multiprocessors; opaque, on the device."""
        ...

    def paged(
        self, q: Tensor, pages: Tensor, weights: Tensor, lens: Tensor, table: Tensor, schedule: Tensor, width: int
    ) -> Tensor:
        """Scores of pages.

        Args:
            q: [B, S, H, 128] e4m3. pages: [blocks, 64, 1, 132] uint8. weights: [B * S, H] float32. All start at multiples of
                16 bytes, q and weights are contiguous, blocks lie apart by a multiple of 16 bytes.
            lens: [B, S] int32, in [1, width], the last of a row not below the others. table: [B, columns] int32, blocks.
            schedule: of `lens`. width: columns of the result.
        Returns: [B * S, width] float32, rows apart; row and column of a token and a position up to its row's last length.
        """
        ...

    def ragged(self, q: Tensor, keys: Tensor, scales: Tensor, weights: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
        """Scores of gathered keys.

        Args:
            q: [T, H, 128] e4m3. keys: [N, 128] e4m3. scales: [N] float32. weights: [T, H] float32. All contiguous, and at
                multiples of 16 bytes. starts, ends: [T] int32, 0 <= start <= end <= N.
        Returns: [T, N] float32, rows apart; see `relative`. What is not in a row's range is anything.
        """
        ...


class DeepGemm(Scores):
    """DeepGEMM's own functions since April 2026; see Scores."""

    def __init__(self, module: Any) -> None:
        """module: `deep_gemm`. Raises: NotThisConvention."""
        self._ragged, self._paged = (_member(module, name) for name in ("fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits"))
        self._schedule, self._num_sms = (_member(module, name) for name in ("get_paged_mqa_logits_metadata", "get_num_sms"))
        names = _known(self._ragged, _RAGGED)
        self._cleans = "clean_logits" in names
        self.relative = not self._cleans
        if self.relative and "max_seqlen_k" not in names:
            raise NotThisConvention(f"{self._ragged.__name__} takes neither clean_logits nor max_seqlen_k")
        self._uncleaned = {"clean_logits": False} if "clean_logits" in _known(self._paged, _PAGED) else {}

    def num_sms(self) -> int:
        """See Scores."""
        return self._num_sms()

    def schedule(self, lens: Tensor) -> Tensor:
        """See Scores."""
        return self._schedule(lens, PAGE, self._num_sms())

    def paged(
        self, q: Tensor, pages: Tensor, weights: Tensor, lens: Tensor, table: Tensor, schedule: Tensor, width: int
    ) -> Tensor:
        """See Scores."""
        return self._paged((q, None), pages, weights, lens, table, schedule, width, **self._uncleaned)

    def ragged(self, q: Tensor, keys: Tensor, scales: Tensor, weights: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
        """See Scores."""
        options: dict[str, Any] = {"clean_logits": False} if self._cleans else {"max_seqlen_k": keys.shape[0]}
        return self._ragged((q, None), (keys, scales), weights, starts, ends, **options)


class Fp8Scores(Scores):
    """Other vendors' names: queries without a second part, column 0 of `ragged` is key 0; see Scores."""

    relative = False

    def __init__(self, module: Any, num_sms: int) -> None:
        """num_sms: of the device, for modules without `get_num_sms`. Raises: NotThisConvention."""
        self._ragged, self._paged = (_member(module, name) for name in ("fp8_mqa_logits", "fp8_paged_mqa_logits"))
        self._schedule = _member(module, "get_paged_mqa_logits_metadata")
        self._num_sms = getattr(module, "get_num_sms", lambda: num_sms)
        ragged, paged = _known(self._ragged, _RAGGED), _parameters(self._paged)
        if paged[:1] + paged[2:7] != _PAGED[:1] + _PAGED[2:]:  # the second is called kv_cache or fused_kv_cache
            raise NotThisConvention(f"{self._paged.__name__} takes ({', '.join(paged)}); known is ({', '.join(_PAGED)}, ...)")
        self._ragged_options, self._paged_options = (
            {"clean_logits": False} if "clean_logits" in names else {} for names in (ragged, paged)
        )

    def num_sms(self) -> int:
        """See Scores."""
        return self._num_sms()

    def schedule(self, lens: Tensor) -> Tensor:
        """See Scores."""
        return self._schedule(lens, PAGE, self._num_sms())

    def paged(
        self, q: Tensor, pages: Tensor, weights: Tensor, lens: Tensor, table: Tensor, schedule: Tensor, width: int
    ) -> Tensor:
        """See Scores."""
        return self._paged(q, pages, weights, lens, table, schedule, width, **self._paged_options)

    def ragged(self, q: Tensor, keys: Tensor, scales: Tensor, weights: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
        """See Scores."""
        return self._ragged(q, (keys, scales), weights, starts, ends, **self._ragged_options)


def scores_of_module(module: Any, num_sms: int) -> Scores:
    """The three functions of a module under DeepGEMM's names of any vendor. Raises: NotThisConvention."""
    try:
        return DeepGemm(module)
    except NotThisConvention as newer:
        try:
            return Fp8Scores(module, num_sms)
        except NotThisConvention as older:
            raise NotThisConvention(f"{newer}; {older}") from older


def _member(module: Any, name: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if function is None:
        raise NotThisConvention(f"{module.__name__} has no {name}")
    if str(getattr(function, "__module__", "")).startswith("mla_portable"):
        raise NotThisConvention(f"{module.__name__} is this project's own stand-in for DeepGEMM")
    return function


def _known(function: Callable[..., Any], expected: list[str]) -> list[str]:
    names = _parameters(function)
    if names[: len(expected)] != expected:
        raise NotThisConvention(f"{function.__name__} takes ({', '.join(names)}); known is ({', '.join(expected)}, ...)")
    return names


# -------------------------------------------------------------------------------------------------------------- trial


def _of_ones(device: torch.device, tokens: int) -> tuple[Tensor, Tensor]:
    """q [T, 64, 128] e4m3 and weights [T, 64] of ones: a key of ones with scale x scores 8192 x, exactly."""
    q = torch.ones((tokens, _HEADS, INDEX_HEAD_SIZE), dtype=torch.float32, device=device).to(torch.float8_e4m3fn)
    return q, torch.ones((tokens, _HEADS), dtype=torch.float32, device=device)


def _try_paged(kernel: Scores, device: torch.device) -> None:
    """Two tokens over the same two pages; position s has scale s + 1."""
    q, weights = _of_ones(device, 2)
    keys = torch.ones((2, PAGE * INDEX_HEAD_SIZE), dtype=torch.float32, device=device).to(torch.float8_e4m3fn)
    scales = torch.arange(1, 2 * PAGE + 1, dtype=torch.float32, device=device).view(2, PAGE).flip(0)
    pages = torch.cat([keys.view(torch.uint8), scales.contiguous().view(torch.uint8)], dim=1)
    pages = pages.view(2, PAGE, 1, INDEX_FP8.row_width)
    lens = torch.tensor([[PAGE + 6], [3]], dtype=torch.int32, device=device)
    table = torch.tensor([[1, 0], [1, 0]], dtype=torch.int32, device=device)
    got = kernel.paged(q.unsqueeze(1), pages, weights, lens, table, kernel.schedule(lens), 2 * PAGE)
    _compare(got[0, : PAGE + 6], 1)
    _compare(got[1, :3], 1)


def _try_ragged(kernel: Scores, device: torch.device) -> None:
    """Two tokens over 300 keys; key s has scale s + 1."""
    q, weights = _of_ones(device, 2)
    keys = torch.ones((300, INDEX_HEAD_SIZE), dtype=torch.float32, device=device).to(torch.float8_e4m3fn)
    scales = torch.arange(1, 301, dtype=torch.float32, device=device)
    starts, ends = (torch.tensor(each, dtype=torch.int32, device=device) for each in ([5, 0], [270, 300]))
    got = kernel.ragged(q, keys, scales, weights, starts, ends)
    first = 0 if kernel.relative else 5
    _compare(got[0, first : first + 265], 6)
    _compare(got[1], 1)


def _compare(got: Tensor, least: int) -> None:
    """`got` are the scores of keys with scales `least`, `least` + 1, ..."""
    want = torch.arange(least, least + got.shape[0], dtype=torch.float32) * (_HEADS * INDEX_HEAD_SIZE)
    if got.dtype != torch.float32 or not torch.equal(got.cpu(), want):
        raise ValueError(f"scores {got.tolist()[:4]}... of {got.dtype}, expected {want.tolist()[:4]}...")


def try_scores(primitive: Primitive[Any], kernel: Scores, device: torch.device) -> None:
    """A tiny problem, whose first call compiles kernels; waits for the device.

    Raises: NotThisConvention where the build refuses it or computes something else; device faults as they come.
    """
    try:
        (_try_ragged if primitive is INDEXER_LOGITS_RAGGED else _try_paged)(kernel, device)
    except REFUSING as error:
        raise refused(f"{primitive} of DeepGEMM", error) from error
