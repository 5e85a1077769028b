# SPDX-License-Identifier: Apache-2.0
"""What every test needs: on a machine without a GPU, Triton's kernels run in its interpreter.

Triton decides that when a kernel is decorated, so the variable must be set before anything imports triton. Tests run side by
side, a process for each core: torch gets one thread in each, for threads that wait for a core stall it past time limits.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and commands fold their tables at it

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1":
    sys.path.insert(0, str(Path(__file__).parents[1] / "ci"))
    import_module("interpreter")  # the same results in less time
    del sys.path[0]
sys.path.append(str(Path(__file__).parents[1] / "ci" / "release"))


_ROOT = str(Path(__file__).parents[1])
_VARIABLES = ("MLA_", "TRITON_", "CUDA_", "XDG_", "HOME", "PATH", "PYTHONPATH", "COLUMNS")


def _settings() -> dict[str, object]:
    """What all tests of a process share, and a test might leave changed; not what an engine sets where it is imported."""
    from mla_portable import dispatch
    from mla_portable.choose.policy import active_rules
    from mla_portable.contracts import Primitive
    from mla_portable.layouts import CORE_LAYOUTS, layout_names

    return {
        "the environment": {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)},
        "the current folder": Path.cwd(),
        "sys.path": [each for each in sys.path if each.startswith(_ROOT)],
        "handlers of signals": [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)],
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": torch.get_default_device(),
        "torch's deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch's filling of fresh memory": torch.utils.deterministic.fill_uninitialized_memory,
        "torch's matmul precision": torch.get_float32_matmul_precision(),
        "torch's gradients": torch.is_grad_enabled(),
        "the registry of a `serving` block": dispatch._override,
        "the policy of a `use` block": active_rules(),
        "the primitives": Primitive.all(),
        "the layouts": [name for name in layout_names() if name in CORE_LAYOUTS],  # a plugin's stay once it is loaded
    }


@pytest.fixture(autouse=True)
def nothing_is_left_changed() -> Iterator[None]:
    """A test that leaves a setting changed fails itself, instead of another one that happens to run after it."""
    before = _settings()
    yield
    after = _settings()
    changed = [name for name, value in before.items() if after[name] != value]
    assert not changed, f"the test left changed: {', '.join(changed)}"


@pytest.fixture(autouse=True)
def fresh_accelerators() -> None:
    """A test that pretends a device patches torch's module of it, whose functions an accelerator looks up once."""
    from mla_portable.accelerator import accelerator

    accelerator.cache_clear()


@pytest.fixture(autouse=True)
def fresh_draws() -> None:
    """What a test draws from torch's own generator does not depend on the tests before it."""
    torch.default_generator.manual_seed(0)


@pytest.fixture
def a_bare_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No GPU and no policy of whoever runs the tests, so that defaults are the same everywhere."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    for name in [name for name in os.environ if name.startswith("MLA_PORTABLE_")]:
        monkeypatch.delenv(name)
    yield


_KIT = (
    *("checkpoint", "four_bits", "other_models", "named_models", "rehearse", "selections", "jobs", "judge", "engine"),
    *("kernel_kinds", "mixed_load", "drawn_weights", "timing", "run_logged", "transformers_truth", "faults", "kit"),
)
_ACCURACY = (
    *("corpus", "questions", "forms", "chosen_keys", "network", "training", "stored", "own_answers", "own_selections"),
    *("asked_engines", "verdict", "command"),
)


def _programs(*folders: str, names: tuple[str, ...]) -> Iterator[SimpleNamespace]:
    """Modules of folders of ci/, importable meanwhile."""
    paths = [str(Path(__file__).parents[1] / "ci" / folder) for folder in folders]
    before = list(sys.path)
    sys.path[:0] = paths
    try:
        yield SimpleNamespace(**{name: import_module(name) for name in names})
    finally:
        sys.path[:] = before
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def kit() -> Iterator[SimpleNamespace]:
    """The modules of ci/vllm_gpu, importable for one file of tests alone."""
    yield from _programs("vllm_gpu", names=_KIT)


@pytest.fixture(scope="module")
def accuracy() -> Iterator[SimpleNamespace]:
    """The modules of ci/accuracy and of the kit, importable for one file of tests alone."""
    yield from _programs("accuracy", "vllm_gpu", names=(*_KIT, *_ACCURACY))
