# SPDX-License-Identifier: Apache-2.0
"""What serves in a process: the gauge that vLLM's own registry shows, and the line that `doctor --engine` reads."""

from __future__ import annotations

import logging

import pytest
from prometheus_client import REGISTRY, generate_latest
from vllm_engine import make_builder, make_engine

from mla_portable.cli.doctor import reading
from mla_portable.engines.common.routing import route_pairs as served_by
from mla_portable.engines.vllm import settings


def test_a_builder_sets_the_gauge_and_logs_a_line_that_is_read(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger=settings.logger.name)
    engine = make_engine("fp8")
    make_builder(engine)
    attention = engine.builder.attention
    pairs = set(served_by(attention.route_decision))
    assert ("sparse_decode", "reference.torch") in pairs
    text = generate_latest(REGISTRY).decode()
    found = [each for each in reading.in_metrics(text) if each.device == attention.facts.name]
    assert {(each.primitive, each.implementation) for each in found} >= pairs and {each.processes for each in found} == {1}
    assert reading.is_of_one_process(text)
    logged = reading.in_log(caplog.text.splitlines()).served
    assert {(each.primitive, each.implementation, each.device) for each in logged} == {
        (*p, attention.facts.name) for p in pairs
    }
