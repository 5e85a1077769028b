# SPDX-License-Identifier: Apache-2.0
"""Time limits for code of plugins."""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar

import pytest

from mla_portable.choose import limits
from mla_portable.choose.faults import PluginRaised
from mla_portable.choose.limits import PluginTimeout, limited, plugin_timeout, running
from mla_portable.contracts import InvalidArgument, PluginError

SETTING: ContextVar[int] = ContextVar("setting", default=0)


def test_the_result_and_the_error_of_the_work_reach_the_caller():
    assert limited("a sum", 10, lambda: 1 + 1) == 2
    error = KeyError("a")
    with pytest.raises(KeyError) as raised:
        limited("a failure", 10, raising(error))
    assert raised.value is error


class Panic(BaseException):
    """Stands for pyo3's PanicException."""


def raising(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


OUTSIDE = [
    (SystemExit(3), "SystemExit: 3"),
    (KeyboardInterrupt(), "KeyboardInterrupt"),
    (GeneratorExit(), "GeneratorExit"),
    (
        Panic("called `Option::unwrap()` on a `None` value\nnote: run with `RUST_BACKTRACE=1`"),
        "Panic: called `Option::unwrap()` on",
    ),
]


@pytest.mark.parametrize(("error", "text"), OUTSIDE, ids=[type(error).__name__ for error, _ in OUTSIDE])
def test_what_the_work_raises_and_is_no_exception_becomes_one(error: BaseException, text: str):
    """A thread of its own shows that none of these is the user's, not even the KeyboardInterrupt."""
    for work in (raising(error), lambda: limited("within a limit", 10, raising(error))):
        with pytest.raises(PluginRaised) as raised:
            limited("a failure", 10, work)
        assert str(raised.value).startswith(text) and "\n" not in str(raised.value)
        assert raised.value.__cause__ is error


def test_without_a_limit_an_interrupt_is_the_users_and_the_rest_the_plugins():
    with pytest.raises(KeyboardInterrupt):
        limited("an interrupt", math.inf, raising(KeyboardInterrupt()))
    with pytest.raises(PluginRaised, match="Panic: why"):
        limited("a panic", math.inf, raising(Panic("why")))


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
def test_what_a_signal_raises_in_the_caller_ends_its_wait(raised: type[BaseException]):
    """Ctrl-C, and a handler of SIGTERM that exits, while a plugin runs in its thread."""

    def handler(number: int, frame: object) -> None:
        raise raised

    release, before = threading.Event(), signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(raised):
            limited("a long one", 60, lambda: release.wait(60))
    finally:
        signal.signal(signal.SIGALRM, before)
        release.set()


def test_the_work_sees_the_callers_context_and_its_own_name():
    token = SETTING.set(7)
    try:
        assert limited("outer", 10, lambda: (SETTING.get(), running())) == (7, "outer")
    finally:
        SETTING.reset(token)
    assert running() == ""


def test_a_limit_within_a_limit_takes_no_second_thread():
    here = threading.get_ident()
    outer, inner = limited("outer", 10, lambda: (threading.get_ident(), limited("inner", 10, threading.get_ident)))
    assert outer == inner != here
    assert limited("no limit", math.inf, threading.get_ident) == here


def test_what_hangs_is_given_up_by_name_and_warned_of_first(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(limits, "WARN_AFTER", 0.01)
    release = threading.Event()
    with pytest.raises(PluginTimeout, match=r"probe of acme\.v1 did not finish within 0\.02 s; MLA_PORTABLE_PLUGIN_TIMEOUT"):
        limited("probe of acme.v1", 0.02, lambda: release.wait(60))
    (left,) = [thread for thread in threading.enumerate() if "acme.v1" in thread.name]
    assert left.daemon
    release.set()
    left.join(10)
    assert issubclass(PluginTimeout, PluginError)
    ((_, level, text),) = caplog.record_tuples
    assert level == logging.WARNING and text.startswith("probe of acme.v1 has been running for 0.01 s")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (None, 120),
        ("", 120),
        (" 5 ", 5),
        ("0", math.inf),
        ("0.5", 0.5),
        *((text, math.inf) for text in ("1e10", "1e400", "inf")),
    ],
)
def test_the_limit_comes_from_the_environment(text: str | None, seconds: float):
    assert plugin_timeout({} if text is None else {limits.PLUGIN_TIMEOUT: text}) == seconds


def test_the_longest_limit_is_one_that_a_thread_can_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "WARN_AFTER", 0.01)
    longest = plugin_timeout({limits.PLUGIN_TIMEOUT: str(int(threading.TIMEOUT_MAX))})
    assert longest == int(threading.TIMEOUT_MAX)
    assert limited("a slow one", longest, lambda: time.sleep(0.1) or "done") == "done"


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "-inf"])
def test_a_limit_that_is_no_number_is_refused(text: str):
    with pytest.raises(InvalidArgument, match="MLA_PORTABLE_PLUGIN_TIMEOUT: got"):
        plugin_timeout({limits.PLUGIN_TIMEOUT: text})
