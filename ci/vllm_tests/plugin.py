# SPDX-License-Identifier: Apache-2.0
"""Run one suite of vLLM's tests in this process by pytest, unchanged, with ours in place; what became of each test is kept.

vLLM's conftest files are not loaded: they import what its other tests need. The fixtures that these tests use are here.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
from suites import Suite

EVENTS: Final = "events.jsonl"

V2_LITE: Final = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_hidden_layers": 27,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "q_lora_rank": None,
    "max_position_embeddings": 163840,
    "vocab_size": 102400,
    "torch_dtype": "bfloat16",
}
"""Sizes of DeepSeek-V2-Lite, which the tests name and then change."""


def provide_models(names: tuple[str, ...], cache: Path) -> None:
    """Let transformers find the configurations of models by their names without a network."""
    for name in names:
        folder = cache / "hub" / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / "main").write_text("0" * 40)
        snapshot = folder / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True, exist_ok=True)
        (snapshot / "config.json").write_text(json.dumps(V2_LITE))
    os.environ |= {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


class Plugin:
    """Fixtures, the choice of tests, and what becomes of them, as events:

    {"begun": test}, {"test": ..., "status": "passed", "failed" or "skipped", "why": ...}; and once {"left_out": {test: why},
    "others": tests that call nothing of ours, "not_drawn": tests that the sample leaves}. The last of a test's statuses counts.
    """

    def __init__(self, suite: Suite, *, sample: int | None, seed: int, on_cpu: bool, tell: Callable[..., None]) -> None:
        """tell: hears of each event, by its values."""
        self._suite, self._sample, self._seed, self._on_cpu, self._tell = suite, sample, seed, on_cpu, tell

    @pytest.fixture
    def default_vllm_config(self) -> Iterator[Any]:
        """A configuration in force."""
        from vllm.config import VllmConfig, set_current_vllm_config

        config = VllmConfig()
        with set_current_vllm_config(config):
            yield config

    @pytest.fixture
    def dist_init(self, default_vllm_config: Any, tmp_path: Path) -> Iterator[None]:
        """Groups of one rank."""
        from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
        from vllm.platforms import current_platform

        init_distributed_environment(
            1, 0, f"file://{tmp_path / 'ranks'}", 0, backend=getattr(current_platform, "dist_backend", "gloo")
        )
        initialize_model_parallel(1, 1)
        yield
        cleanup_dist_env_and_memory()

    @pytest.fixture
    def workspace_init(self) -> Iterator[None]:
        """vLLM's workspace."""
        import torch
        from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager

        init_workspace_manager(torch.device("cpu" if self._on_cpu else "cuda:0"))
        yield
        reset_workspace_manager()

    @pytest.fixture(autouse=True)
    def _as_before(self) -> Iterator[None]:
        """Tests leave torch's defaults as they change them."""
        import torch

        with ExitStack() as stack:
            if self._on_cpu:
                from as_cuda import OnCPU

                stack.enter_context(OnCPU())
            yield
        torch.set_default_device(None)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keep what is of the suite, and of it a sample."""
        chosen = [item for item in items if self._suite.chooses(item.name)]
        left_out = {item.name: self._suite.against(item.name, on_cpu=self._on_cpu) for item in chosen}
        kept = [item for item in chosen if not left_out[item.name]]
        drawn = kept
        if self._sample is not None and self._sample < len(kept):
            drawn = [kept[place] for place in sorted(random.Random(self._seed).sample(range(len(kept)), self._sample))]
        left_out = {test: why for test, why in left_out.items() if why}
        self._tell(left_out=left_out, others=len(items) - len(chosen), not_drawn=len(kept) - len(drawn))
        items[:] = drawn

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """So that a test which comes to no end has a name."""
        self._tell(begun=nodeid.partition("::")[2])

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test that fails before or after it is called has failed."""
        if report.when == "call" or not report.passed:
            self._report(report.nodeid.partition("::")[2], report)

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported has failed, one that skips itself is skipped."""
        if not report.passed:
            self._report(report.nodeid or "the file", report)

    def _report(self, test: str, report: Any) -> None:
        skipped = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else report.longreprtext
        self._tell(test=test, status=report.outcome, why=skipped.removeprefix("Skipped: ")[-3000:])


def run_suite(suite: Suite, sources: Path, folder: Path, *, sample: int | None, seed: int, cpu: str) -> None:
    """Write what happens to `folder`/EVENTS, a line of JSON for each event.

    cpu: the compute capability to imitate on the CPU, "" for a GPU.
    """
    provide_models(suite.model_names, folder)
    if cpu:
        import as_cuda

        major, _, minor = cpu.partition(".")
        as_cuda.install((int(major), int(minor)))
    import in_place
    import vllm

    for place in suite.places:
        in_place.PLACES[place]()
    sys.path.append(str(sources))  # last: vLLM itself is the one that is installed

    with (folder / EVENTS).open("w") as file:

        def tell(**event: Any) -> None:
            file.write(json.dumps(event) + "\n")
            file.flush()

        tell(vllm=vllm.__version__)
        plugin = Plugin(suite, sample=sample, seed=seed, on_cpu=bool(cpu), tell=tell)
        options = ["-q", "--noconftest", "--import-mode=append", "--tb=short", "-p", "no:cacheprovider", "-p", "no:randomly"]
        options += ["-c", os.devnull, f"--rootdir={sources}"]
        pytest.main([*options, str(sources / "tests" / suite.file)], plugins=[plugin])
        tell(ended=True)
