# SPDX-License-Identifier: Apache-2.0
"""What the plugin does in processes of vLLM's own: it is found, stops the start where it has to, and its metrics are collected.

Nothing that a test patches reaches these processes, the form of the layer neither.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mla_portable.cli.doctor import reading
from mla_portable.engines.vllm import plugin, settings


def test_vllm_does_not_start_with_a_mode_that_is_not_allowed():
    """vLLM logs the failure of a plugin's import and goes on; what the plugin itself raises must end the process."""
    code = "from vllm.plugins import load_general_plugins; load_general_plugins(); print('started')"
    environ = {**os.environ, settings.ENV_MODE: "foo"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)
    assert done.returncode and "started" not in done.stdout
    assert "MLA_PORTABLE_VLLM: got 'foo', expected one of auto, custom, override, off. Unset" in done.stderr


def test_vllm_finds_the_entry_point():
    code = (
        "from vllm.plugins import load_general_plugins; load_general_plugins(); load_general_plugins();"
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum as e; print(e.CUSTOM.get_path());"
        "import sys; print('mla_portable.engines.vllm.backend' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == [plugin.BACKEND_PATH, "False"]


CHILD = """
import logging
from mla_portable.engines.common.metrics import publish
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
    assert reading.in_metrics(text) == (reading.Serving("sparse_decode", "nvidia.native", "NVIDIA H200", 2),)
    assert not reading.is_of_one_process(text)
    alone = python(SERVER).stdout
    assert reading.in_metrics(alone) == () and reading.is_of_one_process(alone)


def test_a_metric_that_cannot_be_kept_is_a_warning(tmp_path: Path):
    done = python("import logging; logging.basicConfig()" + CHILD, PROMETHEUS_MULTIPROC_DIR=str(tmp_path / "absent"))
    assert "mla_portable's metric mla_portable_serves is missing" in done.stderr


def test_nothing_is_published_without_prometheus_client():
    python("import sys; sys.modules['prometheus_client'] = None" + CHILD + "\nassert 'torch' not in sys.modules")
