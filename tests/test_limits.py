# SPDX-License-Identifier: Apache-2.0
"""Time limits for code of plugins."""

from __future__ import annotations

import logging
import math
import threading
from contextvars import ContextVar

import pytest

from mla_portable.contracts import InvalidArgument, PluginError
from mla_portable.registry import limits
from mla_portable.registry.limits import PluginTimeout, limited, plugin_timeout, running

SETTING: ContextVar[int] = ContextVar("setting", default=0)


def test_the_result_and_the_error_of_the_work_reach_the_caller():
    assert limited("a sum", 10, lambda: 1 + 1) == 2
    for error in (KeyError("a"), SystemExit(3), KeyboardInterrupt()):

        def work(error: BaseException = error) -> None:
            raise error

        with pytest.raises(type(error)) as raised:
            limited("a failure", 10, work)
        assert raised.value is error


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


@pytest.mark.parametrize(("text", "seconds"), [(None, 120), ("", 120), (" 5 ", 5), ("0", math.inf), ("0.5", 0.5)])
def test_the_limit_comes_from_the_environment(text: str | None, seconds: float):
    assert plugin_timeout({} if text is None else {limits.PLUGIN_TIMEOUT: text}) == seconds


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_a_limit_that_is_no_number_is_refused(text: str):
    with pytest.raises(InvalidArgument, match="MLA_PORTABLE_PLUGIN_TIMEOUT: got"):
        plugin_timeout({limits.PLUGIN_TIMEOUT: text})
