# SPDX-License-Identifier: Apache-2.0
"""The registry of a process: what it logs, and how it fares with threads, forks and several devices."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from fake_plugins import implementation, make_plugin
from machines import CPU, H200
from vendors import ABSENT, GPU_ONLY, WIDE, Vendor, merge, registry

from mla_portable.choose import Registry, get_registry, reset_registry, use
from mla_portable.choose.limits import limited
from mla_portable.contracts import (
    DeviceFacts,
    InvalidArgument,
    PluginError,
    Primitive,
    Reason,
    Request,
)
from mla_portable.primitives import MERGE_STATES, QUANTIZE_PER_TENSOR

# What is logged


def log_lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "mla_portable.choose"]


def test_passing_over_a_cheaper_candidate_is_logged_once_per_reason(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    reg = registry(Vendor("fast", 1, WIDE), Vendor("plain", 9), facts={"cuda": H200})
    request = Request(MERGE_STATES, H200)
    reg.select(request.but(topk=64))
    assert log_lines(caplog) == []
    for topk in (100, 100, 101):
        reg.select(request.but(topk=topk))
    ((level, text),) = log_lines(caplog)
    assert level == "WARNING" and "topk 100 (a multiple of 64)" in text and "plain.v1" in text
    with use("plain"):
        reg.select(request.but(topk=100))
    assert len(log_lines(caplog)) == 1, "a forced choice is the user's own"


@pytest.mark.parametrize(
    ("vendor", "level"),
    [
        (Vendor("gpu", 1, GPU_ONLY), "INFO"),  # nothing that could be had here
        (Vendor("fast", 1, missing=(ABSENT,)), "INFO"),  # on a CPU nobody waits for speed
        (Vendor("fast", 1, wrong=True), "WARNING"),  # a kernel that computes nonsense is news anywhere
    ],
    ids=["other device", "library absent", "wrong"],
)
def test_the_level_says_whether_something_is_lost(vendor: Vendor, level: str, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    vendor.checked.clear()
    reg = registry(vendor, Vendor("plain", 9))
    reg.select(merge(reg))
    assert [each for each, _ in log_lines(caplog)] == [level]


def test_plain_torch_on_an_accelerator_is_a_warning_with_the_plugins_that_are_broken(caplog: pytest.LogCaptureFixture):
    plugins = [("reference", "mla_portable.reference"), ("kernels", "fake_plugins.raises_on_import")]
    reg = Registry(plugins=plugins, facts={"cuda": H200}, environ={})
    for _ in range(2):
        assert reg.select(Request(MERGE_STATES, H200))[0].name == "reference.torch"
    ((level, text),) = log_lines(caplog)
    assert level == "WARNING" and "kernels: plugin did not load: ImportError" in text
    reg.select(Request(QUANTIZE_PER_TENSOR, H200), backend="reference")
    assert len(log_lines(caplog)) == 1, "it was asked for"


# Processes, threads, forks


@pytest.fixture
def own_process_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("MLA_PORTABLE_")]:
        monkeypatch.delenv(name)
    reset_registry()
    yield
    reset_registry()


def test_the_process_has_one_registry_with_the_installed_plugins(own_process_registry: None):
    found: list[Registry] = []
    threads = [threading.Thread(target=lambda: found.append(get_registry())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(reg) for reg in found}) == 1
    (reg,) = set(found)
    assert "reference" in reg.backends and reg is get_registry()
    assert {i.primitive for i in reg.implementations() if i.backend == "reference"} == set(Primitive.all())
    reset_registry()
    assert get_registry() is not reg


@pytest.mark.parametrize(
    "ask", [get_registry, lambda: limited("import of nosy", 20, get_registry)], ids=["at once", "from another thread"]
)
def test_a_plugin_that_asks_for_the_registry_while_it_is_built_is_refused_and_does_not_wait(
    ask: Callable[[], Registry], own_process_registry: None, monkeypatch: pytest.MonkeyPatch
):
    from mla_portable.choose import plugin_sources as loading
    from mla_portable.contracts import hookimpl

    module = make_plugin()
    vars(module)["mla_portable_register"] = hookimpl(lambda registrar: ask())
    sources = loading.given_plugins([("nosy", module), Vendor("plain").plugin()])
    monkeypatch.setattr("mla_portable.choose.registry.installed_plugins", lambda: sources)
    nosy, plain = get_registry().plugin_reports
    assert nosy.error.startswith(PluginError.__name__) and "while it is being built" in nosy.error
    assert plain.ok


def test_of_equal_gpus_the_current_one_or_the_one_asked_about_last_is_used(monkeypatch: pytest.MonkeyPatch):
    current = ["cuda:0"]
    monkeypatch.setattr(
        "mla_portable.choose.machine.resolve_device",
        lambda device: torch.device(current[0] if str(device) == "cuda" else device),
    )
    plugin = make_plugin(implementation("fast.v1"), detectors=(lambda device: H200,))
    machine = Registry(plugins=[("fast", plugin)], environ={})._machine
    assert machine.facts("cuda:0") is machine.facts("cuda:1") is H200
    for current[0], used in (("cuda:0", "cuda:0"), ("cuda:1", "cuda:1"), ("cuda:2", "cuda:1")):
        assert machine.device_of(H200) == torch.device(used)
    machine.facts("cuda:0")
    assert machine.device_of(H200) == torch.device("cuda:0")


def test_one_thread_probes_and_the_others_wait():
    begun, go = threading.Event(), threading.Event()
    calls: list[int] = []

    def check(device: DeviceFacts) -> Iterable[Reason]:
        calls.append(1)
        begun.set()
        go.wait(10)
        return ()

    reg = Registry(plugins=[("fast", make_plugin(implementation("fast.v1", bind=Vendor("x").bind, check=check)))], environ={})
    request = merge(reg)
    chosen: list[str | None] = []
    threads = [threading.Thread(target=lambda: chosen.append(reg.decide(request).chosen)) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert begun.wait(10)
    go.set()
    for thread in threads:
        thread.join()
    assert chosen == ["fast.v1"] * 4 and len(calls) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
def test_a_forked_child_is_not_held_up_by_locks_of_its_parent():
    reg = registry(Vendor("fast"))
    request = merge(reg)
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with reg._lock, reg._machine._lock:
            held.set()
            release.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(10)
    child = os.fork()
    if child == 0:  # in the thread that forked: a new one could be given the identity, and so the locks, of the holder
        signal.alarm(10)
        os._exit(0 if reg.select(request)[0].name == "fast.v1" else 1)
    status = os.waitpid(child, 0)[1]
    release.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("device", [None, 5, ["cpu"]])
def test_what_is_no_device_is_refused(device: Any):
    reg = registry(Vendor("fast"))
    for ask in (reg.facts, partial(reg.probe, reg.implementations()[0])):
        with pytest.raises(InvalidArgument, match=r"facts: device: got .*, expected a torch device such as"):
            ask(device)


def test_devices_that_are_not_here_are_refused():
    reg = registry(Vendor("fast"))
    with pytest.raises(InvalidArgument, match="expected a torch device"):
        reg.facts("gpu")
    assert reg.facts("cpu") is reg.facts("cpu"), "gathered once"
    with pytest.raises(InvalidArgument, match="simulated"):
        registry(Vendor("fast"), facts={"cpu": CPU}).probe(reg.implementations()[0], "cpu")
