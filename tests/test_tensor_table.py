# SPDX-License-Identifier: Apache-2.0
"""Every row of every primitive's table is enforced: each kind of fault is put into each tensor in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from arguments import B, H, K, S, good, on_a_gpu
from torch import Tensor

import mla_portable
from mla_portable.contracts import InvalidArgument, Primitive
from mla_portable.kit.tensor_table import Axes, Checked, TensorTable

WITHOUT_TABLE = {"merge_states", "quantize_per_tensor"}
"""Tensors of any rank."""


def table_of(primitive: Primitive) -> TensorTable:
    return import_module(primitive.module).TENSORS


def rows() -> Iterator[tuple[str, str, Axes]]:
    for primitive in Primitive.all():
        if primitive.module.startswith("mla_portable.") and primitive not in WITHOUT_TABLE:
            for name, row in table_of(primitive).rows.items():
                if isinstance(row, Axes):
                    yield str(primitive), name, row


ROWS = list(rows())


def argument(arguments: dict[str, Any], name: str) -> Tensor | None:
    """`name` may be that of a part, "out[0]"."""
    outer, _, part = name.partition("[")
    value = arguments.get(outer)
    return value[int(part[0])] if part else value


def changed(arguments: dict[str, Any], name: str, value: object) -> dict[str, Any]:
    outer, _, part = name.partition("[")
    if part:
        whole = list(arguments[outer])
        whole[int(part[0])] = value
        value = tuple(whole)
    return {**arguments, outer: value}


FAULTS: dict[str, Callable[[Tensor], object]] = {
    "no tensor": lambda tensor: tensor.tolist() if tensor.dtype.itemsize > 1 else [1],
    "another dtype": lambda tensor: torch.zeros(tensor.shape, dtype=torch.float64),
    "an axis more": lambda tensor: tensor.unsqueeze(0),
    "an axis less": lambda tensor: tensor.select(0, 0),
    "sparse": lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype).to_sparse(),
    "another device": lambda tensor: on_a_gpu(*tensor.shape, dtype=tensor.dtype),
}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("primitive", "name", "row"), ROWS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_tensor_that_does_not_fit_its_row_is_refused(primitive: str, name: str, row: Axes, fault: str):
    arguments = good(primitive)
    tensor = argument(arguments, name)
    if tensor is None and name.startswith("extra_"):
        cache = arguments.get("kv_cache", arguments.get("kv"))
        extra = {"extra_kv_cache": cache.clone(), "extra_indices": arguments["indices"].clone()}
        arguments |= {**extra, "extra_lengths": torch.zeros(arguments["indices"].shape[:-1], dtype=torch.int32)}
        tensor = argument(arguments, name)
    elif tensor is None and name == "seq_lens":
        arguments["seq_lens"] = tensor = torch.zeros(arguments["block_table"].shape[0], dtype=torch.int32)
    elif tensor is None:
        arguments["scores_out"] = tensor = torch.zeros(arguments["q"].shape[0], K)
    if fault == "sparse" and tensor.dtype.itemsize == 1:
        tensor = tensor.float()  # there are no sparse tensors of FP8: the dtype is at fault then
    with pytest.raises(InvalidArgument) as refused:
        getattr(mla_portable, primitive)(**changed(arguments, name, FAULTS[fault](tensor)))
    error = refused.value
    first = next(iter(table_of(Primitive.named(primitive)).rows)) == name
    if fault == "another device" and first:  # the call is on the device of the first: the next one is elsewhere
        assert error.where == primitive and "cpu" in error.got
    else:
        assert (error.where, error.argument) == (primitive, name)
    assert error.got and error.expected


def test_the_tables_are_those_of_all_primitives_but_two():
    assert {primitive for primitive, *_ in ROWS} == {
        str(each) for each in Primitive.all() if each.module.startswith("mla_portable.") and each not in WITHOUT_TABLE
    }


def written() -> Iterator[tuple[str, str, str]]:
    for primitive in {primitive: None for primitive, *_ in ROWS}:
        table = table_of(Primitive.named(primitive))
        for name, row in table.rows.items():
            for other in table.rows:
                if row.written and other != name and argument(good(primitive), other) is not None:
                    yield primitive, name, other


@pytest.mark.parametrize(("primitive", "result", "other"), list(written()))
def test_a_result_in_the_memory_of_another_tensor_is_refused(primitive: str, result: str, other: str):
    arguments = good(primitive)
    one, two = argument(arguments, result), argument(arguments, other)
    if one is None:
        one = torch.zeros(arguments["q"].shape[0], K)
        arguments["scores_out"] = one
    assert two is not None
    memory = torch.zeros(max(one.nbytes, two.nbytes), dtype=torch.uint8)
    for name, tensor in ((result, one), (other, two)):
        arguments = changed(arguments, name, memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape))
    with pytest.raises(InvalidArgument, match="memory that overlaps") as refused:
        getattr(mla_portable, primitive)(**arguments)
    assert refused.value.where == primitive and refused.value.argument in (result, other)


TABLE = TensorTable(
    "f",
    {
        "q": Axes("B S H width", torch.float32, not_empty="S H"),
        "cache": Checked(),
        "starts": Axes("B+1", torch.int32),
        "sink": Axes("H", torch.float32, optional=True),
        "out": Axes("B S H width", torch.float32, optional=True, written=True),
    },
    given="width",
)


def values(**changes: Any) -> list[Any]:
    fine = {
        "q": torch.zeros(B, S, H, 8),
        "cache": torch.zeros(9),
        "starts": torch.zeros(B + 1, dtype=torch.int32),
        "sink": None,
        "out": torch.zeros(B, S, H, 8),
    }
    return list({**fine, **changes}.values())


def test_sizes_are_those_of_the_tensors():
    assert TABLE.check(values(), {"width": 8}) == {"width": 8, "B": B, "S": S, "H": H}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"q": torch.zeros(B, S, H, 7)}, "f: q: got shape [3, 2, 4, 7], expected [B, S, H, 8] = [3, 2, 4, 8]."),
        ({"q": torch.zeros(B, S, 0, 8)}, "f: q: got shape [3, 2, 0, 8], expected [B, S, H, 8] with S and H of at least 1."),
        ({"q": torch.zeros(B, H, 8)}, "f: q: got shape [3, 4, 8], expected 4 dimensions, [B, S, H, 8]."),
        ({"q": None}, "f: q: got None, expected a tensor [B, S, H, 8]."),
        ({"starts": torch.zeros(B, dtype=torch.int32)}, "f: starts: got shape [3], expected [B + 1] = [4]."),
        ({"sink": torch.zeros(B)}, "f: sink: got shape [3], expected [H] = [4]."),
        (
            {"out": torch.zeros(8, B, S, H).permute(1, 2, 3, 0)},
            "f: out: got strides [8, 4, 1, 24], expected [B, S, H, 8] whose last dimension is contiguous (stride 1). "
            "Pass out.contiguous().",
        ),
        (
            {"out": torch.zeros(1, 1, 1, 8).expand(B, S, H, 8)},
            "f: out: got strides [0, 0, 0, 1] for shape [3, 2, 4, 8], expected memory of its own for each element, "
            "because it is written. Allocate out with torch.empty, without expand.",
        ),
    ],
)
def test_a_refusal_says_what_was_given_and_what_fits(changes: dict[str, Any], text: str):
    with pytest.raises(InvalidArgument) as refused:
        TABLE.check(values(**changes), {"width": 8})
    assert str(refused.value) == text


def test_rows_cut_from_wider_ones_fit_and_inputs_may_overlap():
    wide = torch.zeros(B, S, H, 16)
    TABLE.check(values(q=wide[..., :8], out=None), {"width": 8})
    TABLE.check(values(q=wide[..., :8], cache=wide), {"width": 8})
    TABLE.check(values(out=wide[..., :8]), {"width": 8})
