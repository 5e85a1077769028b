# SPDX-License-Identifier: Apache-2.0
"""Views of callers' tensors: made once, made again where the memory behind a tensor changed, gone with the tensor."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from mla_portable.contracts import InvalidArgument
from mla_portable_common.flash_mla.cache_view import CacheView
from mla_portable_common.flat_rows import FlatDecode
from mla_portable_common.kept_views import KeptViews


def counted() -> tuple[KeptViews[Tensor], list[Tensor]]:
    made: list[Tensor] = []

    def make(tensor: Tensor) -> Tensor:
        made.append(tensor)
        return tensor.view(-1)

    return KeptViews(make), made


def test_a_view_is_made_once_for_a_tensor():
    views, made = counted()
    first, second = torch.zeros(2, 3), torch.zeros(2, 3)
    assert views.known(first) is None
    assert views.of(first) is views.of(first) is views.known(first)
    assert views.of(first).data_ptr() == first.data_ptr() and len(made) == 1
    assert views.of(second).data_ptr() == second.data_ptr() and len(made) == 2
    assert views.of(first).data_ptr() == first.data_ptr() and len(made) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.set_(torch.zeros(2, 3)),
        lambda tensor: tensor.resize_(2, 2),
        lambda tensor: tensor.as_strided_((2, 3), (0, 1)),
    ],
)
def test_a_view_is_made_again_where_the_tensor_has_changed(change):
    made: list[Tensor] = []
    views = KeptViews(lambda tensor: made.append(tensor) or tensor)
    tensor = torch.zeros(2, 3)
    views.of(tensor)
    change(tensor)
    assert views.known(tensor) is None
    view = views.of(tensor)
    assert (view.data_ptr(), view.shape, view.stride()) == (tensor.data_ptr(), tensor.shape, tensor.stride())
    assert len(made) == 2


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_view_keeps_no_memory_alive(mode):
    with mode():
        views, _ = counted()
        tensor = torch.zeros(2, 3)
        views.of(tensor)
        gone = weakref.ref(tensor)
        memory = weakref.ref(views.of(tensor))
        del tensor
        assert gone() is None and memory() is None


def test_memory_that_a_caller_swaps_out_lives_until_the_next_call():
    views = KeptViews(lambda tensor: tensor.view(-1))
    tensor = torch.zeros(2, 3)
    old = weakref.ref(views.of(tensor))
    tensor.data = torch.ones(2, 3)
    assert views.known(tensor) is None and old() is not None
    assert torch.equal(views.of(tensor), torch.ones(6))
    assert old() is None


def test_a_refused_tensor_is_refused_again():
    views, cache = CacheView(whole_rows=True), torch.zeros(2 * 656 * 64 + 16, dtype=torch.uint8)
    apart = cache.as_strided((2, 64, 656), (656 * 64 + 16, 656, 1))
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="one of 656 bytes, for FlashMLA's kernel"):
            views.of(apart)
    assert CacheView().of(apart).shape == (2, 64, 1, 656)


def test_a_decode_looks_once_at_a_cache():
    class Attend:
        def __init__(self) -> None:
            self.looked, self.given = 0, []

        def view_of(self, kv):
            self.looked += 1
            return kv

        def __call__(self, q, kv, indices, **options):
            self.given.append(kv)
            return q, q

    attend = Attend()
    decode, cache = FlatDecode(attend), torch.zeros(2, 4, 576).bfloat16()
    q, indices = torch.zeros(1, 1, 64, 576).bfloat16(), torch.zeros(1, 1, 128, dtype=torch.int32)
    for _ in range(3):
        decode(q, cache, indices, softmax_scale=1.0)
    assert attend.looked == 1 and attend.given[0] is attend.given[2]
    assert attend.given[0].shape == (8, 576) and attend.given[0].data_ptr() == cache.data_ptr()
