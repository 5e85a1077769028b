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
from mla_portable.choose.faults import contained
from mla_portable.contracts import InvalidArgument, PluginError
from mla_portable.kit.defaults import neutral_defaults

PLUGIN_TIMEOUT: Final = "MLA_PORTABLE_PLUGIN_TIMEOUT"
"""The environment variable with the limit in seconds; 0 means no limit."""
DEFAULT_SECONDS: Final = 120.0
WARN_AFTER: Final = 10.0
"""Seconds until a warning names what is still running."""

T = TypeVar("T")
logger = logging.getLogger("mla_portable.choose")
_running: contextvars.ContextVar[str] = contextvars.ContextVar("mla_portable_limited", default="")


class PluginTimeout(PluginError):
    """Code of a plugin did not finish within its time limit."""


def plugin_timeout(environ: Mapping[str, str]) -> float:
    """The limit that `MLA_PORTABLE_PLUGIN_TIMEOUT` sets, in seconds; 120 where it is not set.

    It is infinite where it is 0, or more than a thread can wait (`threading.TIMEOUT_MAX`, some centuries).
    Raises: InvalidArgument when the value is no number of 0 or more.
    """
    text = environ.get(PLUGIN_TIMEOUT, "").strip()
    if not text:
        return DEFAULT_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:  # NaN is not either
        raise InvalidArgument("environment", PLUGIN_TIMEOUT, got=repr(text), expected="seconds, 0 or more (0: no limit)")
    return seconds if 0 < seconds <= threading.TIMEOUT_MAX else math.inf


def running() -> str:
    """What runs under a limit in this context, as given to `limited`; "" outside of one."""
    return _running.get()


def limited(what: str, seconds: float, work: Callable[[], T]) -> T:
    """Run code of a plugin in a thread of its own and return its result; what it raises is raised here, as an Exception.

    Signals reach the main thread alone. So an interrupt by the user, or what a handler of a signal raises, ends the waiting of
    the caller and is raised as it is; what is raised in the thread is the plugin's. Without a limit both are raised in the
    caller's thread, where a KeyboardInterrupt is taken for the user's and everything else for the plugin's.

    The thread sees the caller's context variables, but torch's settings of a thread (current device and stream, gradients,
    inference mode, autocast) are torch's own defaults there: `work` sets what it needs. A call inside another one runs
    directly, under the outer limit.

    Args:
        what: names plugin and stage in messages, e.g. "probe of acme.v1 / sparse_decode". seconds: the limit; no thread
            is started where it is infinite.
    Raises: PluginTimeout after `seconds`. The thread is left behind: Python cannot stop it, and a daemon thread does not
        keep the process alive. PluginRaised for what the work raises and is no Exception; its Exceptions as they are.
    """
    if running() or seconds == math.inf:
        return contained(work)
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        _running.set(what)
        try:
            results.append(contained(work))
        except Exception as error:
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


def isolated(what: str, device: torch.device | None, seconds: float, work: Callable[[], T]) -> T:
    """Run `work` under neutral defaults and a time limit; given a device, on that and the caller's current stream of it.

    Raises: as `limited`.
    """
    carried = nullcontext() if device is None else accelerator(device).carried()

    def run() -> T:  # in a thread that has no current device or stream yet
        with torch.no_grad(), carried:
            return work()

    with neutral_defaults():  # here, so that the default dtype of the process is restored even after a timeout
        return limited(what, seconds, run)
