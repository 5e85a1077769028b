# SPDX-License-Identifier: Apache-2.0
"""Errors travel between processes: they keep their class, message and fields through pickle and copy."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import pytest
from fake_plugins import implementation, make_plugin
from machines import CPU, H200

from mla_portable.attention import AttentionSpec, SparseMLAAttention, UnsupportedRoute
from mla_portable.choose import Registry
from mla_portable.choose.limits import PluginTimeout
from mla_portable.contracts import (
    Decision,
    InvalidArgument,
    MLAPortableError,
    PlanMismatch,
    PluginError,
    Reason,
    Request,
    UnknownBackend,
    UnsupportedRequest,
    Verdict,
)
from mla_portable.primitives import SPARSE_DECODE

REASON = Reason("arch", "sm90", "supports sm80", "use another backend")
DECISION = Decision(Request(SPARSE_DECODE, H200, num_heads=16), None, "default", None, (Verdict("a.v1", (REASON,), 1),))


def unsupported_route() -> UnsupportedRoute:
    limits = {"num_heads": 2, "kv_layout": "bf16", "block_size": 4, "topk": 8, "softmax_scale": 0.1}
    spec = AttentionSpec(**limits, max_num_tokens=4, max_num_reqs=2, max_model_len=16)
    plugin = make_plugin(implementation("a.v1", SPARSE_DECODE))
    registry = Registry(plugins=[("a", plugin)], facts={"cpu": CPU}, environ={})
    with pytest.raises(UnsupportedRoute) as refusal:
        SparseMLAAttention(spec, device="cpu", registry=registry)
    return refusal.value


ERRORS: list[MLAPortableError] = [
    InvalidArgument("sparse_decode", "q", got="None", expected="a tensor", remedy="Give one."),
    UnknownBackend("argument", "backend", got="'tritn'", expected="triton", remedy="Did you mean 'triton'?"),
    UnsupportedRequest(DECISION),
    PlanMismatch("plan again"),
    PluginError("malformed"),
    PluginTimeout("too slow"),
    unsupported_route(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    "through", [lambda e: pickle.loads(pickle.dumps(e)), copy.deepcopy, copy.copy], ids=["pickle", "deepcopy", "copy"]
)
def test_an_error_keeps_its_class_message_and_fields(error: MLAPortableError, through: Callable[[object], object]):
    got = through(error)
    assert type(got) is type(error) and str(got) == str(error) and vars(got) == vars(error)


def refused() -> None:
    raise UnsupportedRequest(DECISION)


def test_a_process_pool_hands_an_error_over():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        with pytest.raises(UnsupportedRequest) as refusal:
            pool.submit(refused).result(timeout=120)
        assert refusal.value.decision == DECISION
