# SPDX-License-Identifier: Apache-2.0
"""Launches through the CUDA driver, against a stand-in of libcuda that keeps a current context for each thread."""

from __future__ import annotations

import ctypes
import pickle
import threading
from types import SimpleNamespace

import pytest
import torch

from mla_portable.choose.faults import is_fatal
from mla_portable_nvidia.native.runtime import driver

CONTEXT = 0xC0DE  # of device 0; device n has CONTEXT + n


class Driver:
    """libcuda as far as a launch needs it. `code`: what a launch returns; it has no context unless the thread was given one."""

    def __init__(self, code: int = 0, *, current: int | None = CONTEXT) -> None:
        self.code, self.launched, self.calls = code, [], []
        self.thread = threading.local()
        self.thread.context = current  # of the thread that makes this

    def cuDeviceGet(self, handle, device):  # noqa: N802
        handle._obj.value = device
        return 0

    def cuDevicePrimaryCtxRetain(self, context, handle):  # noqa: N802
        self.calls.append("retain")
        context._obj.value = CONTEXT + handle.value
        return 0

    def cuCtxSetCurrent(self, context):  # noqa: N802
        self.calls.append("set")
        self.thread.context = context.value
        return 0

    def _needs_context(self, what, code=0):
        self.calls.append(what)
        return code if getattr(self.thread, "context", None) else 201

    def cuOccupancyMaxActiveClusters(self, count, function, config):  # noqa: N802
        count._obj.value = 7
        return self._needs_context("clusters")

    def cuLaunchKernelEx(self, config, function, parameters, extra):  # noqa: N802
        code = self._needs_context("launch", self.code)
        if code != 201:
            size = ctypes.c_size_t.from_address(extra[3]).value
            words = [extra[0], extra[2], extra[4]]
            self.launched.append((ctypes.string_at(extra[1], size), words, config._obj))
        return code

    def cuGetErrorString(self, code, text):  # noqa: N802
        text._obj.value = b"words of the driver"


@pytest.fixture
def install(monkeypatch):
    """Puts a Driver in place of libcuda."""

    def put(library: Driver) -> Driver:
        monkeypatch.setattr(driver, "_driver", lambda: library)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 1000 + device, raising=False)
        monkeypatch.setattr(torch.cuda, "device", lambda device: _Nothing())
        driver._context.cache_clear()
        return library

    yield put
    driver._context.cache_clear()


class _Nothing:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def kernel(changing="P i", fixed="q", device=0):
    return driver.Kernel(SimpleNamespace(), None, "name", changing, fixed, threads=256, shared=4096, device=device)


def test_an_early_start_is_an_attribute_beside_the_clusters(install):
    library = install(Driver())
    for cluster, starts_early in ((1, True), (4, True), (4, False)):
        kernel().prepare((6, cluster), cluster, -1, starts_early=starts_early)(77, 5)
    said = [[(each.id, list(each.value)) for each in c.attributes[: c.num_attributes]] for _, _, c in library.launched]
    assert said == [[(6, [1, 0, 0])], [(4, [1, 4, 1]), (6, [1, 0, 0])], [(4, [1, 4, 1])]]


def on_a_thread(work):
    """What `work` raised on a thread of its own, None where it ran."""
    raised = []

    def target():
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_a_launch_is_one_packed_buffer(install):
    library = install(Driver())
    clustered = kernel(device=1).prepare((6, 3), 3, -1)
    kernel().prepare((6, 1), 1, -1)(77, 5)
    for address, number in ((77, 5), (2**63 + 1, -2)):
        clustered(address, number)
    (_, _, alone), (packed, words, config), (again, _, _) = library.launched
    assert packed == (77).to_bytes(8, "little") + (5).to_bytes(4, "little") + bytes(4) + b"\xff" * 8
    assert again == (2**63 + 1).to_bytes(8, "little") + b"\xfe" + b"\xff" * 3 + bytes(4) + b"\xff" * 8
    assert words == [1, 2, None]
    assert (config.grid_x, config.grid_y, config.grid_z, config.block_x, config.shared) == (6, 3, 1, 256, 4096)
    assert (config.stream, config.num_attributes) == (1001, 1)
    assert (config.attributes[0].id, list(config.attributes[0].value)) == (4, [1, 3, 1])
    assert alone.num_attributes == 0
    assert library.calls == ["launch"] * 3, "a thread with a context is not given one"


@pytest.mark.parametrize("device", [0, 1])
def test_a_thread_without_a_context_gets_that_of_the_device_once(install, device):
    library = install(Driver())
    launch = kernel(device=device).prepare((6, 1), 1, -1)

    def twice():
        launch(77, 5)
        launch(78, 6)
        assert library.thread.context == CONTEXT + device

    for _ in range(2):
        assert on_a_thread(twice) is None
    assert [packed[0] for packed, _, _ in library.launched] == [77, 78] * 2
    assert library.calls == ["launch", "retain", "set", "launch", "launch", "launch", "set", "launch", "launch"]


def test_a_new_shape_may_be_prepared_on_a_thread_without_a_context(install):
    install(Driver())
    of = kernel()
    assert on_a_thread(lambda: of.max_clusters(4)) is None


@pytest.mark.parametrize(("code", "kind"), [(701, driver.DriverError), (2, torch.cuda.OutOfMemoryError)])
def test_a_failed_launch_is_raised_in_the_drivers_words(install, code, kind):
    install(Driver(code))
    with pytest.raises(kind, match=rf"launch of name, 6 x 1 blocks: words of the driver \(CUDA driver error {code}\)"):
        kernel("i", "i").prepare((6, 1), 1, 2)(1)


@pytest.mark.parametrize(
    ("code", "fault"), [(700, True), (716, True), (719, True), (214, True), (226, True), (1, False), (701, False), (912, False)]
)
def test_a_lost_device_is_told_from_a_refused_call(install, code, fault):
    """As torch spells it, so that the registry need not know the class."""
    install(Driver(code))
    with pytest.raises(driver.DriverError) as caught:
        kernel("i", "i").prepare((6, 1), 1, 2)(1)
    again = pickle.loads(pickle.dumps(caught.value))
    for error in (caught.value, again):
        assert (error.code, error.fault, is_fatal(error, "cuda")) == (code, fault, fault)
        assert (f"CUDA error: words of the driver (CUDA driver error {code})" in str(error)) is fault
