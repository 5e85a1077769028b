# SPDX-License-Identifier: Apache-2.0
"""What serves in a process: the gauge that vLLM's own registry shows, and the line that `doctor --engine` reads."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, generate_latest
from vllm_engine import make_builder, make_engine

from mla_portable.engine import serving
from mla_portable.engine.routing import serving as served_by
from mla_portable.vllm import settings


def test_a_builder_sets_the_gauge_and_logs_a_line_that_is_read(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger=settings.logger.name)
    engine = make_engine("fp8")
    make_builder(engine)
    attention = engine.builder.attention
    pairs = set(served_by(attention.route_decision))
    assert ("sparse_decode", "reference.torch") in pairs
    text = generate_latest(REGISTRY).decode()
    found = [each for each in serving.in_metrics(text) if each.device == attention.facts.name]
    assert {(each.primitive, each.implementation) for each in found} >= pairs and {each.processes for each in found} == {1}
    assert serving.is_of_one_process(text)
    logged = serving.in_log(caplog.text)
    assert {(each.primitive, each.implementation, each.device) for each in logged} == {
        (*p, attention.facts.name) for p in pairs
    }


CHILD = """
import logging
from mla_portable.engine.serving import publish
publish("NVIDIA H200", [("sparse_decode", "nvidia.native")] * 2, logging.getLogger())
"""
SERVER = """
import sys
from prometheus_client import generate_latest
from vllm.v1.metrics.prometheus import get_prometheus_registry
sys.stdout.write(generate_latest(get_prometheus_registry()).decode())
"""


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def test_workers_reach_the_metrics_of_vllms_server_where_it_collects_those_of_all_processes(tmp_path: Path):
    folder = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for _ in range(2):
        python(CHILD, **folder)
    text = python(SERVER, **folder).stdout
    assert serving.in_metrics(text) == (serving.Serving("sparse_decode", "nvidia.native", "NVIDIA H200", 2),)
    assert not serving.is_of_one_process(text)
    alone = python(SERVER).stdout
    assert serving.in_metrics(alone) == () and serving.is_of_one_process(alone)


def test_a_metric_that_cannot_be_kept_is_a_warning(tmp_path: Path):
    done = python("import logging; logging.basicConfig()" + CHILD, PROMETHEUS_MULTIPROC_DIR=str(tmp_path / "absent"))
    assert "mla_portable's metric mla_portable_serves is missing" in done.stderr


def test_nothing_is_published_without_prometheus_client():
    python("import sys; sys.modules['prometheus_client'] = None" + CHILD + "\nassert 'torch' not in sys.modules")
