# SPDX-License-Identifier: Apache-2.0
"""What callers and engines keep of choices (`Registry.keep`) follows the policy in force, and goes with the registry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from machines import A100
from recorder import Recorder, registry_of

import mla_portable
from mla_portable.choose import Registry, get_registry, reset_registry
from mla_portable.contracts import UnsupportedRequest
from mla_portable.engines.common.index_keys import key_writer
from mla_portable.engines.sglang.pool_rows import of_device
from mla_portable.layouts import FP8_DS_MLA
from mla_portable.primitives import INDEXER_CACHE_WRITE, MERGE_STATES

PAGES = torch.zeros(5, 64, 132, dtype=torch.uint8)


class Vendors:
    """Two plugins that write keys and rows, the first preferred, and one that does neither; each with what it bound."""

    def __init__(self) -> None:
        self.first, self.second = Recorder("first.tape", preference=1.0), Recorder("second.tape", preference=2.0)
        self.lacking = Recorder("lacking.tape", primitives=(MERGE_STATES,))

    def bound(self) -> dict[str, int]:
        """How often each bound a writer of keys."""
        plugins = self.first, self.second, self.lacking
        return {each.name: sum(request.primitive is INDEXER_CACHE_WRITE for request in each.bound) for each in plugins}


@pytest.fixture
def vendors(monkeypatch: pytest.MonkeyPatch) -> Iterator[Vendors]:
    """The plugins of the process's own registry, and of every one that follows it."""
    made = Vendors()
    facts = replace(A100, device_type="cpu")  # tensors of this test are on the CPU

    def build(**options: Any) -> Registry:
        return registry_of(made.first, made.second, made.lacking, facts={"cpu": facts})

    monkeypatch.setattr("mla_portable.choose.registry.Registry", build)
    reset_registry()
    yield made
    reset_registry()


# ------------------------------------------------------------------------------------------------------ engines


def test_a_writer_of_keys_is_bound_once_for_pages_that_are_alike(vendors: Vendors):
    writer = key_writer(PAGES)
    assert key_writer(PAGES) is writer and key_writer(torch.zeros(9, 64, 132, dtype=torch.uint8)) is writer
    assert vendors.bound() == {"first.tape": 1, "second.tape": 0, "lacking.tape": 0}
    assert key_writer(torch.zeros(5, 32, 132, dtype=torch.uint8)) is not writer


def test_a_forced_choice_reaches_the_writer_of_keys_that_an_engine_keeps(vendors: Vendors):
    writer = key_writer(PAGES)
    with mla_portable.use(indexer_cache_write="second"):
        forced = key_writer(PAGES)
        assert forced is not writer and vendors.bound()["second.tape"] == 1
        assert key_writer(PAGES) is forced, "kept inside of the block as well"
        with mla_portable.use(indexer_cache_write="first.tape"):
            key_writer(PAGES)(*[None] * 4)
    assert vendors.first.calls and not vendors.second.calls
    with mla_portable.use(indexer_cache_write="second"):
        assert key_writer(PAGES) is forced
        key_writer(PAGES)(*[None] * 4)
    assert vendors.second.calls
    assert key_writer(PAGES) is writer, "the choice outside of the blocks is that of before"
    assert vendors.bound() == {"first.tape": 1, "second.tape": 1, "lacking.tape": 0}


def test_a_forced_choice_that_cannot_write_keys_is_refused_though_a_writer_is_kept(vendors: Vendors):
    writer = key_writer(PAGES)
    for _ in range(2):
        with mla_portable.use(indexer_cache_write="lacking"), pytest.raises(UnsupportedRequest, match="never falls back"):
            key_writer(PAGES)
    assert key_writer(PAGES) is writer


def test_after_a_reset_the_writer_of_keys_is_a_new_one(vendors: Vendors):
    writer = key_writer(PAGES)
    reset_registry()
    assert key_writer(PAGES) is not writer
    assert vendors.bound()["first.tape"] == 2


def test_a_reload_of_the_policy_chooses_the_writer_of_keys_again(vendors: Vendors):
    key_writer(PAGES)
    get_registry()._environ = {"MLA_PORTABLE_BACKEND_INDEXER_CACHE_WRITE": "second"}
    get_registry().reload_policy()
    key_writer(PAGES)
    assert vendors.bound() == {"first.tape": 1, "second.tape": 1, "lacking.tape": 0}


def test_the_rows_of_sglangs_pool_follow_the_policy(vendors: Vendors):
    device = torch.device("cpu")

    def served_by() -> str:
        found = of_device(device, FP8_DS_MLA)
        assert found is not None and of_device(device, FP8_DS_MLA) is found
        return found.served_by

    first = of_device(device, FP8_DS_MLA)
    assert served_by() == "cache_write first.tape, gather_upconvert first.tape"
    with mla_portable.use(cache_write="second"):
        assert served_by() == "cache_write second.tape, gather_upconvert first.tape"
    assert of_device(device, FP8_DS_MLA) is first
    reset_registry()
    assert of_device(device, FP8_DS_MLA) is not first


# --------------------------------------------------------------------------------------------------- Registry.keep


class Counted:
    """Makes a new object at each call."""

    def __init__(self) -> None:
        self.made: list[object] = []

    def __call__(self) -> object:
        self.made.append(object())
        return self.made[-1]


def own() -> Registry:
    return registry_of(Recorder("first.tape"), Recorder("second.tape"))


def test_equal_keys_are_made_once():
    registry, make = own(), Counted()
    kept = registry.keep(("writer", 1), make)
    assert registry.keep(("writer", 1), make) is kept and len(make.made) == 1
    assert registry.keep(("writer", 2), make) is not kept and len(make.made) == 2
    assert own().keep(("writer", 1), make) is not kept, "each registry keeps its own"


def test_nothing_is_kept_as_well():
    """That an engine's own kernels serve is an answer, too."""
    registry, asked = own(), list[int]()
    for _ in range(2):
        assert registry.keep("stock serves", lambda: asked.append(1)) is None
    assert asked == [1]


def test_a_reload_of_the_policy_empties_what_is_kept():
    registry, make = own(), Counted()
    before = registry.keep("writer", make)
    registry.reload_policy()
    assert not registry._kept
    after = registry.keep("writer", make)
    assert after is not before and registry.keep("writer", make) is after


def test_a_use_block_keeps_its_own():
    registry, make = own(), Counted()
    outside = registry.keep("writer", make)
    for _ in range(2):  # equal blocks share what they keep
        with mla_portable.use("first"):
            inside = registry.keep("writer", make)
            assert inside is not outside
            with mla_portable.use(merge_states="second"):
                assert registry.keep("writer", make) not in (inside, outside)
    assert registry.keep("writer", make) is outside and len(make.made) == 3


def test_what_is_made_while_the_policy_changes_is_not_kept():
    """It may have been chosen under the policy of before."""
    registry, make = own(), Counted()

    def slowly() -> object:
        registry.reload_policy()
        return make()

    first = registry.keep("writer", slowly)
    second = registry.keep("writer", make)
    assert second is not first and list(registry._kept.values()) == [second]


def test_of_what_two_threads_make_at_once_both_get_the_first():
    registry, make = own(), Counted()
    inner: list[object] = []

    def meanwhile() -> object:
        inner.append(registry.keep("writer", make))  # another thread, which was faster
        return make()

    assert registry.keep("writer", meanwhile) is inner[0] and len(make.made) == 2


def test_what_fails_is_not_kept():
    registry, make = own(), Counted()

    def fail() -> object:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        registry.keep("writer", fail)
    assert registry.keep("writer", make) is make.made[0]
