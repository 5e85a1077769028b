# SPDX-License-Identifier: Apache-2.0
"""A time limit for code of a plugin: import, check, bind and probe must not hang a command without a word."""

from __future__ import annotations

import contextvars
import logging
import math
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Final, TypeVar

import torch

from mla_portable.accelerator import accelerator
from mla_portable.contracts import InvalidArgument, PluginError, neutral_defaults

PLUGIN_TIMEOUT: Final = "MLA_PORTABLE_PLUGIN_TIMEOUT"
"""The environment variable with the limit in seconds; 0 means no limit."""
DEFAULT_SECONDS: Final = 120.0
WARN_AFTER: Final = 10.0
"""Seconds until a warning names what is still running."""

T = TypeVar("T")
logger = logging.getLogger("mla_portable.registry")
_running: contextvars.ContextVar[str] = contextvars.ContextVar("mla_portable_limited", default="")


class PluginTimeout(PluginError):
    """Code of a plugin did not finish within its time limit."""


def plugin_timeout(environ: Mapping[str, str]) -> float:
    """The limit that `MLA_PORTABLE_PLUGIN_TIMEOUT` sets, in seconds; 120 where it is not set, infinite where it is 0.

    Raises: InvalidArgument when the value is no number of 0 or more.
    """
    text = environ.get(PLUGIN_TIMEOUT, "").strip()
    if not text:
        return DEFAULT_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise InvalidArgument("environment", PLUGIN_TIMEOUT, got=repr(text), expected="seconds, 0 or more (0: no limit)")
    return seconds or math.inf


def running() -> str:
    """What runs under a limit in this context, as given to `limited`; "" outside of one."""
    return _running.get()


def limited(what: str, seconds: float, work: Callable[[], T]) -> T:
    """Run `work` in a thread of its own and return its result; what it raises is raised here.

    The thread sees the caller's context variables, but torch's settings of a thread (current device and stream, gradients,
    inference mode, autocast) are torch's own defaults there: `work` sets what it needs. A call inside another one runs
    directly, under the outer limit.

    Args:
        what: names plugin and stage in messages, e.g. "probe of acme.v1 / sparse_decode". seconds: the limit; no thread
            is started where it is infinite.
    Raises: PluginTimeout after `seconds`. The thread is left behind: Python cannot stop it, and a daemon thread does not
        keep the process alive.
    """
    if running() or seconds == math.inf:
        return work()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        _running.set(what)
        try:
            results.append(work())
        except BaseException as error:  # the caller decides what to do with SystemExit and KeyboardInterrupt
            errors.append(error)

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(run,), name=f"mla_portable: {what}", daemon=True)
    thread.start()
    thread.join(min(seconds, WARN_AFTER))
    if thread.is_alive() and seconds > WARN_AFTER:
        logger.warning("%s has been running for %g s; the limit is %g s (%s)", what, WARN_AFTER, seconds, PLUGIN_TIMEOUT)
        thread.join(seconds - WARN_AFTER)
    if results:
        return results[0]
    if errors:
        raise errors[0]
    raise PluginTimeout(f"{what} did not finish within {seconds:g} s; {PLUGIN_TIMEOUT} sets another limit, 0 none")


def guarded(what: str, seconds: float, work: Callable[[], T]) -> T:
    """Run code of a plugin under a time limit; its own KeyboardInterrupt is a failure, the user's is not.

    Signals reach the main thread alone, so one that is raised in the thread of the work is the plugin's. Without a limit the
    work runs in the caller's thread, and an interrupt there is taken for the user's.

    Raises: PluginTimeout; PluginError for a KeyboardInterrupt of the plugin's; what the work raises.
    """

    def run() -> T:
        try:
            return work()
        except KeyboardInterrupt as error:
            if threading.current_thread() is threading.main_thread():
                raise
            raise PluginError(f"{what} raised KeyboardInterrupt") from error

    return limited(what, seconds, run)


def isolated(what: str, device: torch.device | None, seconds: float, work: Callable[[], T]) -> T:
    """Run `work` under neutral defaults and a time limit; given a device, on that and the caller's current stream of it.

    Raises: PluginTimeout; whatever `work` raises.
    """
    carried = nullcontext() if device is None else accelerator(device).carried()

    def run() -> T:  # in a thread that has no current device or stream yet
        with torch.no_grad(), carried:
            return work()

    with neutral_defaults():  # here, so that the default dtype of the process is restored even after a timeout
        return limited(what, seconds, run)
