# SPDX-License-Identifier: Apache-2.0
"""What a model's indexer selected for tokens of real text: a small file that benchmarks read beside random lists.

The file is a numpy archive (.npz, compressed, without pickled objects):

    format       int, 1
    about        text, JSON: {"model": name, "made": how and from what}
    positions    int32 [L, R, K]: what each of L layers selected for each of R tokens, in the indexer's order, then -1
    seen         int32 [R]: the keys that a token may select, which are the positions 0 to seen - 1
    request      int32 [R]: which request a token is of. Rows of one request follow one another, `seen` ascending in them
    layers       int32 [L]: the layers' numbers in the model, ascending

and, where the indexer's own inputs were kept, of one request with N keys, for I of the layers and S of its tokens:

    index_layers   int32 [I], among `layers`
    index_keys     uint16 [I, N, D], the bits of bfloat16: keys as the indexer scores them, rotary part applied
    index_queries  uint16 [I, S, H, D], likewise
    index_weights  float32 [I, S, H], all factors on a head's score applied: score = sum over h of weight * relu(q . k)
    index_seen     int32 [S], ascending

Each row has min(K, seen) distinct positions. Rows that follow one another in a request tell how much neighbours share, so a few
long runs of tokens say more than many single ones.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np
import torch
from torch import Tensor

from mla_portable.errors import InvalidArgument
from mla_portable.kit.whole_files import replace_file
from mla_portable.layouts import INDEX_HEAD_SIZE

SUFFIX: Final = ".npz"
_FORMAT: Final = 1
_WHERE: Final = "selections"
_MUST: Final = ("format", "about", "positions", "seen", "request", "layers")
_INDEX: Final = ("index_layers", "index_keys", "index_queries", "index_weights", "index_seen")
_DTYPES: Final = {"index_keys": np.uint16, "index_queries": np.uint16, "index_weights": np.float32}
"""Of arrays that are not int32."""

Array: TypeAlias = "np.ndarray[Any, Any]"


@dataclass(frozen=True, slots=True, eq=False)
class IndexSample:
    """The indexer's inputs for some tokens of one request; shapes and meaning above.

    Attributes:
        layers: [I] numbers in the model. keys: [I, N, D] bf16. queries: [I, S, H, D] bf16. weights: [I, S, H] float32.
        seen: [S] int32.
    Raises: InvalidArgument.
    """

    layers: Array
    keys: Tensor
    queries: Tensor
    weights: Tensor
    seen: Array

    def __post_init__(self) -> None:
        layers, seen = np.asarray(self.layers, np.int32), np.asarray(self.seen, np.int32)
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "seen", seen)
        if self.keys.dim() != 3 or self.queries.dim() != 4 or not self.keys.numel() or not self.queries.numel():
            got = f"shapes {list(self.keys.shape)} and {list(self.queries.shape)}"
            _refuse("index_keys, index_queries", got, "[I, N, D] and [I, S, H, D], not empty")
        count, num_keys, width = self.keys.shape
        if width != INDEX_HEAD_SIZE:
            _refuse("index_keys", f"{width} numbers a key", f"{INDEX_HEAD_SIZE}")
        expected = (count, len(seen), self.queries.shape[2], width)
        if tuple(self.queries.shape) != expected or tuple(self.weights.shape) != expected[:3] or layers.shape != (count,):
            got = f"shapes {list(self.queries.shape)}, {list(self.weights.shape)} and {list(layers.shape)}"
            _refuse("index_queries, index_weights, index_layers", got, f"{list(expected)}, {list(expected[:3])} and [{count}]")
        if seen.min() < 1 or seen.max() > num_keys or (np.diff(seen) < 0).any():
            _refuse("index_seen", f"{seen.min()} to {seen.max()}", f"ascending numbers from 1 to {num_keys}, the keys")
        if not all(bool(each.isfinite().all()) for each in (self.keys, self.queries, self.weights)):
            _refuse("index_keys, index_queries, index_weights", "a number that is not finite", "finite numbers")


@dataclass(frozen=True, slots=True, eq=False)
class Selections:
    """What layers selected; shapes and meaning above.

    Attributes:
        model: its name. made: how, and from what text. positions: [L, R, K] int32. seen, request: [R] int32.
        layers: [L] int32. index: None where the indexer's inputs were not kept.
    Raises: InvalidArgument for what no indexer can have selected.
    """

    model: str
    made: str
    positions: Array
    seen: Array
    request: Array
    layers: Array
    index: IndexSample | None = None

    def __post_init__(self) -> None:
        for name, rank in (("positions", 3), ("seen", 1), ("request", 1), ("layers", 1)):
            value = np.asarray(getattr(self, name))
            if value.dtype.kind not in "iu" or value.ndim != rank or not value.size:
                _refuse(name, f"{value.dtype} {list(value.shape)}", f"integers of {rank} dimensions, not empty")
            object.__setattr__(self, name, np.ascontiguousarray(value, np.int32))
        for name, text in (("model", self.model), ("made", self.made)):
            if not text.strip() or not text.isprintable():
                _refuse(name, repr(text), "a line of text")
        layers, rows, _ = self.positions.shape
        for name, size in (("seen", rows), ("request", rows), ("layers", layers)):
            if getattr(self, name).shape != (size,):
                _refuse(
                    name, f"shape {list(getattr(self, name).shape)}", f"[{size}], as positions {list(self.positions.shape)}"
                )
        if (np.diff(self.layers) <= 0).any() or self.layers[0] < 0:
            _refuse("layers", str(self.layers.tolist()), "numbers of layers, ascending")
        if self.seen.min() < 1:
            _refuse("seen", str(int(self.seen.min())), "at least 1: a token sees itself")
        self._check_requests()
        for at, layer in enumerate(self.layers.tolist()):
            self._check_layer(layer, self.positions[at])
        extra = [] if self.index is None else sorted(set(self.index.layers.tolist()) - set(self.layers.tolist()))
        if extra:
            _refuse("index_layers", str(extra), f"layers of the file, {self.layers.tolist()}")

    def _check_requests(self) -> None:
        starts = np.flatnonzero(np.diff(self.request)) + 1
        firsts = [int(self.request[0]), *self.request[starts].tolist()]
        if len(set(firsts)) != len(firsts):
            _refuse("request", "rows of one request apart from one another", "rows of one request together")
        falls = np.flatnonzero((np.diff(self.seen) <= 0) & (np.diff(self.request) == 0))
        if len(falls):
            row = int(falls[0])
            _refuse("seen", f"{self.seen[row]}, then {self.seen[row + 1]} in row {row + 1}", "ascending within a request")

    def _check_layer(self, layer: int, positions: Array) -> None:
        wanted = np.minimum(self.seen, self.topk)
        present = np.arange(self.topk) < wanted[:, None]
        ordered = np.sort(np.where(present, positions, np.iinfo(np.int32).max - np.arange(self.topk)), axis=1)
        wrong = ((positions >= 0) != present).any(axis=1)
        wrong |= (np.where(present, positions, 0) >= self.seen[:, None]).any(axis=1) | (positions < -1).any(axis=1)
        wrong |= (np.diff(ordered, axis=1) == 0).any(axis=1)
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            valid = np.unique(positions[row][(positions[row] >= 0) & (positions[row] < self.seen[row])])
            got = f"{len(valid)} distinct positions below {self.seen[row]} in row {row} of layer {layer}"
            _refuse("positions", got, f"min(K, seen) = {wanted[row]} of them, then -1")

    @property
    def topk(self) -> int:
        """K of the lists."""
        return self.positions.shape[2]

    def runs(self) -> Iterator[slice]:
        """Rows that are neighbours: one request, each sees one key more than the row before it."""
        breaks = np.flatnonzero((np.diff(self.seen) != 1) | (np.diff(self.request) != 0)) + 1
        edges = [0, *breaks.tolist(), len(self.seen)]
        for begin, end in pairwise(edges):
            yield slice(begin, end)


def write_selections(
    path: Path | str,
    positions: Array | Tensor,
    seen: Array | Tensor,
    *,
    model: str,
    made: str,
    request: Array | Tensor | None = None,
    layers: Array | Tensor | None = None,
    index: IndexSample | None = None,
) -> Selections:
    """Check selections and write them to a file. A program that captures them calls this.

    Args:
        path: ends in .npz. positions: [L, R, K], any integers, -1 behind a row that sees fewer than K. seen: [R].
        model, made: a line of text each: the model's name; how this was made, and from what text.
        request: [R], None where all rows are of one. layers: [L], None for 0 to L - 1.
    Returns: what was written.
    Raises: InvalidArgument.
    """
    target = Path(path)
    if target.suffix != SUFFIX:
        _refuse("path", str(target), f"a name that ends in {SUFFIX}")
    lists, counts = _array(positions), _array(seen)
    owners = np.zeros(counts.shape, np.int32) if request is None else _array(request)
    numbers = np.arange(lists.shape[0], dtype=np.int32) if layers is None else _array(layers)
    found = Selections(model, made, lists, counts, owners, numbers, index)
    arrays: dict[str, Any] = {
        "format": np.int32(_FORMAT),
        "about": np.str_(json.dumps({"model": model, "made": made})),
        **{name: getattr(found, name) for name in ("positions", "seen", "request", "layers")},
    }
    if index is not None:
        arrays |= {"index_layers": index.layers, "index_seen": index.seen, "index_weights": _array(index.weights.float())}
        arrays |= {"index_keys": _bits(index.keys), "index_queries": _bits(index.queries)}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    replace_file(target, buffer.getvalue())
    return found


def read_selections(path: Path | str) -> Selections:
    """The selections of a file. Raises: InvalidArgument, with the file's name, for a file that is none."""
    try:
        return _read(Path(path))
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}", error.argument, got=error.got, expected=error.expected) from error
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InvalidArgument(f"{path}", "file", got=reason, expected=f"a file of selections, {SUFFIX}") from error


def _read(path: Path) -> Selections:
    loaded: Any = np.load(path, allow_pickle=False)
    if not isinstance(loaded, np.lib.npyio.NpzFile):
        _refuse("file", "one array", f"an archive of arrays, {SUFFIX}")
    with loaded as archive:
        arrays: dict[str, Array] = {name: archive[name] for name in archive.files}
    missing = [name for name in _MUST if name not in arrays]
    some = [name for name in _INDEX if name in arrays]
    if some and len(some) < len(_INDEX):
        missing += [name for name in _INDEX if name not in arrays]
    unknown = sorted(set(arrays) - {*_MUST, *_INDEX})
    if missing or unknown:
        words = [f"without {', '.join(missing)}"] * bool(missing) + [f"with {', '.join(unknown)}"] * bool(unknown)
        _refuse("arrays", " and ".join(words), "those of docs/dev/bench.md and no others")
    version = arrays.pop("format")
    if version.shape or version != _FORMAT:
        _refuse("format", str(version), f"{_FORMAT}, which this release reads")
    about = _about(arrays.pop("about"))
    for name, value in arrays.items():
        dtype = _DTYPES.get(name, np.int32)
        if value.dtype != dtype:
            _refuse(name, str(value.dtype), np.dtype(dtype).name)
    index = None
    if some:
        keys, queries = (_numbers(arrays[name]) for name in ("index_keys", "index_queries"))
        weights = torch.from_numpy(arrays["index_weights"])
        index = IndexSample(arrays["index_layers"], keys, queries, weights, arrays["index_seen"])
    own = {name: arrays[name] for name in ("positions", "seen", "request", "layers")}
    return Selections(about["model"], about["made"], **own, index=index)


def _about(value: Array) -> Mapping[str, str]:
    text = str(value)
    about: Any = json.loads(text) if value.dtype.kind == "U" and not value.shape else None
    if not isinstance(about, dict) or not all(isinstance(about.get(name), str) for name in ("model", "made")):
        _refuse("about", text[:80], 'JSON with the texts "model" and "made"')
    return about  # pyright: ignore[reportUnknownVariableType]


def _array(value: Array | Tensor) -> Array:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)


def _bits(value: Tensor) -> Array:
    """bfloat16 as uint16, which numpy knows."""
    return value.detach().cpu().bfloat16().contiguous().view(torch.int16).numpy().view(np.uint16)


def _numbers(bits: Array) -> Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def _refuse(argument: str, got: str, expected: str) -> NoReturn:
    raise InvalidArgument(_WHERE, argument, got=got, expected=expected)
