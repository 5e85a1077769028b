# SPDX-License-Identifier: Apache-2.0
"""Registry: plugins, machine and policy in one place; it chooses the implementation for a request.

A process has one (`get_registry`); a test builds its own, with plugins, devices and a policy of its choice. A bound callable is
the implementation's own and never comes back here. The public functions ask for `choice_token` in each call, to notice a
changed policy.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal, TypeVar, cast
from weakref import WeakSet

import torch

from mla_portable.accelerator import default_device, known_types
from mla_portable.choose.bound import Bound
from mla_portable.choose.facts import parse_device
from mla_portable.choose.faults import PluginRaised, blame, contained, first_line
from mla_portable.choose.limits import DEFAULT_SECONDS, plugin_timeout, running
from mla_portable.choose.machine import Machine
from mla_portable.choose.names import REFERENCE, check_backend
from mla_portable.choose.own_times import Ignored, OwnTimes
from mla_portable.choose.plugin_sources import given_plugins, installed_plugins
from mla_portable.choose.plugins import Brought, PluginReport, load_offers, load_plugins
from mla_portable.choose.policy import ARGUMENT, KnownNames, Policy, Rule, active_rules, check_names
from mla_portable.choose.probe import ProbeReport
from mla_portable.choose.select import CostTable, decide
from mla_portable.choose.settings import check_variables, set_variables
from mla_portable.contracts import (
    Baseline,
    Decision,
    DeviceFacts,
    Implementation,
    InvalidArgument,
    PluginError,
    Reason,
    Request,
    Tunable,
    UnsupportedRequest,
)
from mla_portable.contracts.primitive import F, Primitive
from mla_portable.contracts.values import check_flag, check_type, describe, refuse
from mla_portable.kit.defaults import neutral_defaults
from mla_portable.times.configurations import Configurations, Configured
from mla_portable.times.files import TimesFile
from mla_portable.times.measured import MeasuredCosts
from mla_portable.times.prompts import PromptRecord, PromptTimes, recorded_prompts

CACHE_LIMIT: Final = 4096
"""Choices, bound callables and log keys that are kept of each; beyond that all are dropped and made again as needed."""

logger = logging.getLogger("mla_portable.choose")

_REQUEST: Final = "a mla_portable.contracts.Request"
_IMPLEMENTATION: Final = "an Implementation, one of `Registry.implementations()`"
_REENTERED: Final = "the registry was asked for while it is being built: a plugin's hook may only register"

_NOTHING: Final = object()
"""Is not kept for a key; None may be."""

K = TypeVar("K")
T = TypeVar("T")
_Key = tuple[Request, "str | None", tuple[Rule, ...]]


class Registry:
    """Chooses the implementation for a request, and says why not the others.

    Safe to use from several threads. A forked child may go on with what was gathered before the fork.
    """

    def __init__(
        self,
        *,
        plugins: Iterable[tuple[str, object]] | None = None,
        facts: Mapping[str, DeviceFacts] | None = None,
        policy: Policy | None = None,
        environ: Mapping[str, str] | None = None,
        probe: bool = True,
        costs: CostTable | Literal["measured"] | None = None,
    ) -> None:
        """Load plugins and read the policy; no device is touched.

        Args:
            plugins: (name, module or object with the hook, or a module's name) instead of the installed entry points.
            facts: devices to simulate, by torch name ("cuda" stands for every index of it). On a device that is not
                here declarations alone decide: neither `check` nor a probe looks at the machine that is.
            policy: instead of the environment's. environ: instead of os.environ; names the user's own times too.
            probe: False trusts `check` and computes nothing.
            costs: measured costs, which rank before declared costs; None where only these count. "measured" for the
                times that plugins bring and the user's own.
        Raises: InvalidArgument for an argument of another type. A broken plugin or policy does not raise here: `plugin_reports`
            has broken plugins, and every choice raises the error of a broken policy.
        """
        _check_arguments(facts, policy, environ, probe, costs)
        self._given_policy, self._environ = policy, environ
        environ = os.environ if environ is None else environ
        loaded = load_plugins(
            installed_plugins() if plugins is None else given_plugins(plugins),
            disabled=dict((Policy.from_environment(environ) if policy is None else policy).disabled),
            seconds=_seconds(environ),
        )
        order = {primitive: rank for rank, primitive in enumerate(Primitive.all())}
        self._implementations = tuple(sorted(loaded.implementations, key=lambda i: (order[i.primitive], i.preference, i.name)))
        self._reports, self._variables = loaded.reports, loaded.variables
        self.engines = loaded.engines
        """Engines that this package or a plugin has an adapter for."""
        self._baselines, self._tunables = loaded.baselines, loaded.tunables
        self._unloaded = frozenset(r.name for r in self._reports if not r.loaded)
        self._known = KnownNames((i.name for i in self._implementations), self._unloaded)
        self._machine = Machine(detectors=loaded.detectors, simulated=facts)
        self._probing, self._given_costs, self._shipped = probe, costs, loaded.times
        self._use_times(OwnTimes())
        self._policy = Policy()
        self._policy_error: InvalidArgument | None = None
        self._generation = 0
        self._names_checked: set[tuple[Rule, ...]] = set()
        self._selected: dict[_Key, tuple[Implementation | None, Decision]] = {}
        self._bound: dict[tuple[str, Request], Any] = {}
        self.dispatched: dict[tuple[Any, ...], Any] = {}
        """For the public functions' own cache in front of `bind`: it goes where the registry goes."""
        self._kept: dict[tuple[Hashable, object], Any] = {}
        self._logged: set[object] = set()
        self._rejected: set[object] = set()
        """Kinds of requests, with a tuned configuration, whose probe failed (`Machine.kind_of`)."""
        self._lock = threading.RLock()
        try:
            self.reload_policy()
        except InvalidArgument as error:
            self._policy_error = error
        _alive.add(self)

    def renew_locks(self) -> None:
        """Forget who held the locks: for the child of a fork, where those threads do not exist."""
        self._lock = threading.RLock()
        self._machine.renew_lock()

    def implementations(self, primitive: Primitive[F] | None = None) -> tuple[Implementation[F], ...]:
        """All that loaded plugins offer (for one primitive), by primitive, declared cost and name.

        Raises: InvalidArgument for what is no Primitive, such as a name.
        """
        if primitive is not None:
            check_type("Registry.implementations", "primitive", primitive, Primitive, "a mla_portable.contracts.Primitive")
        return tuple(i for i in self._implementations if primitive is None or i.primitive is primitive)

    @property
    def backends(self) -> tuple[str, ...]:
        """The names that `backend=` accepts for a whole vendor, sorted."""
        return self._known.backends

    @property
    def plugin_reports(self) -> tuple[PluginReport, ...]:
        """What became of each plugin, in the order of loading; a detector that failed since counts against its plugin."""
        failed = self._machine.detector_failures
        return tuple(replace(r, ok=False, error=failed[r.name]) if r.ok and r.name in failed else r for r in self._reports)

    def baselines(self) -> Brought[Baseline]:
        """What plugins bring to the benchmark, loaded now. Never raises on a plugin's behalf: a failure costs only its own."""
        return load_offers(self._baselines, Baseline, self._reports, seconds=self._machine.limit)

    def tunables(self) -> Brought[Tunable]:
        """The implementations that can be tuned, in the same way."""
        return load_offers(self._tunables, Tunable, self._reports, seconds=self._machine.limit)

    @property
    def policy(self) -> Policy:
        """What environment, or the constructor, force and disable; without `use(...)` blocks and arguments.

        Raises: InvalidArgument or UnknownBackend when that is malformed or names what is unknown.
        """
        if self._policy_error is not None:
            raise self._policy_error.with_traceback(None)
        return self._policy

    def reload_policy(self) -> None:
        """Read the environment and the user's own times again. What is bound and probes' results stay as they are.

        A plugin that was disabled when the registry was built stays out: it takes a new process to import it. What cannot be
        used of the user's times is ignored, which is logged once and is in `times_ignored`.
        Raises: InvalidArgument or UnknownBackend; the old policy and times stay in force then.
        """
        environ = os.environ if self._environ is None else self._environ
        check_variables(environ, self._variables, self._unloaded)
        policy = Policy.from_environment(environ) if self._given_policy is None else self._given_policy
        check_names(policy, self._known)
        own = OwnTimes.read(environ, {(each.name, str(each.primitive)) for each in self._implementations})
        for each in own.ignored:
            if each not in self._own.ignored:
                logger.warning("%s; %s", each.what, each.remedy)
        self._machine.limit = plugin_timeout(environ)
        with self._lock:
            self._policy, self._policy_error = policy, None
            self._use_times(own)
            self._generation += 1
            self._selected.clear()
            self._bound.clear()
            self.dispatched.clear()
            self._kept.clear()

    def _use_times(self, own: OwnTimes) -> None:
        """Rank, configure and decide on prompts by what plugins ship and by the user's own times, which come first."""
        self._own, shipped = own, self._shipped
        self._configurations = Configurations((*shipped, *own.files))
        if isinstance(self._given_costs, str):
            self._costs = MeasuredCosts(
                (each for file in shipped for each in file.times), own=(each for file in own.files for each in file.times)
            )
            self._prompts = [*_prompts_of(shipped), *_prompts_of(own.files)]
        else:
            self._costs, self._prompts = self._given_costs, list[PromptRecord]()

    @property
    def times_files(self) -> tuple[TimesFile, ...]:
        """The files of times that were read: those that plugins ship, then the user's own, which have no owner."""
        return (*self._shipped, *self._own.files)

    @property
    def times_ignored(self) -> tuple[Ignored, ...]:
        """What of the user's own times is ignored, and why."""
        return self._own.ignored

    @property
    def environment(self) -> tuple[tuple[str, str], ...]:
        """(name, value) of this project's variables that are set, those that exist."""
        return set_variables(os.environ if self._environ is None else self._environ, self._variables)

    def choice_token(self) -> object:
        """A cheap hashable value; while it stays equal, equal requests get equal choices. For caches in front of `bind`."""
        return self._generation, active_rules()

    def keep(self, key: Hashable, make: Callable[[], T]) -> T:
        """`make()`, once for equal keys while the policy in force stays the same: for what a caller binds for many calls."""
        generation, whole = self._generation, (key, self.choice_token())
        found = self._kept.get(whole, _NOTHING)
        return self._keep(self._kept, whole, make(), generation) if found is _NOTHING else found

    def device_types(self) -> list[str]:
        """The device types that torch or a plugin's declaration names, torch's accelerator first, "cpu" last."""
        return known_types(each for i in self._implementations for each in i.support.device_types or ())

    def default_device(self) -> torch.device:
        """The first device that is here of `device_types`: an accelerator where there is one, else the CPU."""
        return default_device(self.device_types())

    def facts(self, device: torch.device | str) -> DeviceFacts:
        """As `Machine.facts`."""
        return self._machine.facts(device)

    def guard(self, device: torch.device | str) -> AbstractContextManager[object]:
        """As `Machine.guard`."""
        return self._machine.guard(device)

    def probe(self, implementation: Implementation, device: torch.device | str, *, layout: str | None = None) -> ProbeReport:
        """As `Machine.probe`. A choice does not ask this: it computes one problem of the request's own sizes and features."""
        check_type("Registry.probe", "implementation", implementation, Implementation, _IMPLEMENTATION)
        check_type("Registry.probe", "layout", layout, (str, type(None)), "the name of a cache layout, or None")
        return self._machine.probe(implementation, parse_device(device), layout)

    def decide(self, request: Request, *, backend: str | None = None, probe: bool = True, thorough: bool = False) -> Decision:
        """Who serves `request`, and why not the others.

        Args:
            backend: overrides every other wish. probe: False computes nothing. thorough: look at every candidate, for an
                explanation, instead of as far as the choice needs.
        Raises: UnknownBackend for a name that no plugin has; InvalidArgument for a `backend` that is no text, and under graph
            capture where a candidate has not been probed for the request yet; errors of the device that a probe runs into.
        A request that nothing can serve is no error here: `chosen` is None.
        """
        check_type("Registry.decide", "request", request, Request, _REQUEST)
        check_flag("Registry.decide", "probe", probe)
        check_flag("Registry.decide", "thorough", thorough)
        check_backend(backend)
        return self._decide((request, backend, active_rules()), probe=probe, thorough=thorough)

    def _decide(self, key: _Key, *, probe: bool = True, thorough: bool = False) -> Decision:
        request, backend, active = key
        stronger = active if backend is None else (Rule(backend, ARGUMENT), *active)
        policy = self.policy.under(stronger)
        if stronger not in self._names_checked:
            check_names(Policy(stronger), self._known)
            if len(self._names_checked) >= CACHE_LIMIT:
                self._names_checked.clear()
            self._names_checked.add(stronger)
        machine, device = self._machine, self._machine.device_of(request.device)

        def check(implementation: Implementation) -> tuple[Reason, ...]:
            assert device is not None
            return machine.check(implementation, device, request.device)

        def try_out(implementation: Implementation) -> tuple[Reason, ...]:
            assert device is not None
            tuned = self.tuned(implementation, request)
            if tuned is not None:
                reasons = machine.try_request(implementation, device, request.but(configuration=tuned.configuration))
                if not reasons:
                    return ()
                self._reject(implementation, request, tuned, reasons)
            return machine.try_request(implementation, device, request)

        return decide(
            request,
            self._implementations,
            policy,
            check=check if device is not None else None,
            probe=try_out if device is not None and probe and self._probing else None,
            thorough=thorough,
            costs=self._costs,
            plugin_failures=[(report.name, report.trouble) for report in self.plugin_reports if not report.ok],
        )

    def select(self, request: Request[F], *, backend: str | None = None) -> tuple[Implementation[F], Decision]:
        """The implementation that serves `request`, and the decision; remembered for equal requests, refusals too.

        Raises: UnsupportedRequest with all reasons when nothing, or not the forced backend, can; as `decide` otherwise.
        """
        check_type("Registry.select", "request", request, Request, _REQUEST)
        check_backend(backend)
        return self._select(request, (request, backend, active_rules()))

    def _select(self, request: Request[F], key: _Key) -> tuple[Implementation[F], Decision]:
        known = self._selected.get(key)
        if known is None:
            generation = self._generation
            decision = self._decide(key)
            known = self.chosen(decision), decision
            self._log_once(decision)
            self._keep(self._selected, key, known, generation)
        chosen, decision = known
        if chosen is None:
            raise UnsupportedRequest(decision)
        return chosen, decision

    def chosen(self, decision: Decision) -> Implementation | None:
        """The implementation that a decision chose; None where it chose nothing."""
        return next((i for i in self.implementations(decision.request.primitive) if i.name == decision.chosen), None)

    def resolve(self, request: Request[F], *, backend: str | None = None) -> Bound[F]:
        """What serves `request`: callable, implementation and decision.

        Raises: as `select`, and whatever the implementation's own `bind` raises.
        """
        check_type("Registry.resolve", "request", request, Request, _REQUEST)
        check_backend(backend)
        _, decision = self._select(request, (request, backend, active_rules()))
        return self.bound(decision, request.primitive)

    def bound(self, decision: Decision, primitive: Primitive[F]) -> Bound[F]:
        """What a decision of this registry chose, bound for the decision's request; the same callable for equal requests.

        Raises: UnsupportedRequest where it chose nothing; InvalidArgument for a decision on another primitive; whatever the
            implementation's own `bind` raises.
        """
        request = decision.request.of(primitive)
        implementation = self.chosen(decision)
        if implementation is None:
            raise UnsupportedRequest(decision)
        self._log_once(decision)
        key, generation = (implementation.name, request), self._generation
        call = self._bound.get(key)
        if call is None:
            call = self._keep(self._bound, key, self.bind_implementation(implementation, request), generation)
        return Bound(call, implementation, self.configured(implementation, request), decision)

    def bind(self, request: Request[F], *, backend: str | None = None) -> F:
        """The callable of `resolve`. Who has several GPUs makes the tensors' own the current one around a call."""
        check_type("Registry.bind", "request", request, Request, _REQUEST)
        return self.resolve(request, backend=backend).call

    def _keep(self, known: dict[K, T], key: K, value: T, generation: int) -> T:
        """Remember a value that was found under the policy of `generation`. Returns: what an equal request gets from now on."""
        with self._lock:
            if generation != self._generation:
                return value
            if len(known) >= CACHE_LIMIT:
                known.clear()
            return known.setdefault(key, value)

    def configured(self, implementation: Implementation, request: Request[F]) -> Request[F]:
        """`request` with the configuration that files of times have for this implementation (`tuned`)."""
        _check_pair("configured", implementation, request)
        found = self.tuned(implementation, request)
        return request.but(configuration=found and found.configuration)

    def tuned(self, implementation: Implementation, request: Request) -> Configured | None:
        """The configuration that files of times have for this implementation, and the file; None as shipped.

        As shipped, too, where the probe of that configuration failed for such a request: times only make kernels faster.
        """
        _check_pair("tuned", implementation, request)
        found = self._configurations.of(implementation.name, request)
        if found is None:
            return None
        kind = self._machine.kind_of(implementation, request.but(configuration=found.configuration))
        return None if kind in self._rejected else found

    def _reject(self, implementation: Implementation, request: Request, tuned: Configured, reasons: tuple[Reason, ...]) -> None:
        """Leave such requests as shipped from now on, and say so, once for each configuration."""
        configured = request.but(configuration=tuned.configuration)
        self._rejected.add(self._machine.kind_of(implementation, configured))
        with self._lock:
            key = (implementation.name, implementation.primitive, tuned)
            if key in self._logged:
                return
            self._logged.add(key)
        words = " ".join(f"{name}={value}" for name, value in tuned.configuration)
        what = f"{implementation.name} / {implementation.primitive}: the tuned configuration {words} in {tuned.file}"
        why = ", ".join(map(str, reasons))
        logger.warning("%s is not used, but the shipped one: %s; run `mla-portable tune` again, or delete the row", what, why)

    def bind_implementation(self, implementation: Implementation[F], request: Request[F]) -> F:
        """The callable of a given implementation for `request`, with the configuration that files of times have for it.

        Raises: InvalidArgument, which names the file, where the implementation refuses that configuration; PluginError where
            its own `bind` raises what is no Exception; whatever else that raises.
        """
        _check_pair("bind_implementation", implementation, request)
        tuned = self.tuned(implementation, request)
        request = request.but(configuration=tuned and tuned.configuration)
        try:
            with neutral_defaults():
                return contained(partial(implementation.bind, request))
        except PluginRaised as error:
            blame(error, f"raised in bind by {implementation.name} / {implementation.primitive}")
            raise
        except (KeyError, TypeError, ValueError) as error:
            if tuned is None:
                raise
            raise InvalidArgument(
                "file of times",
                tuned.file,
                got=f"for {implementation.name} / {request.primitive}: {first_line(error)}",
                expected="a configuration that the implementation accepts",
                remedy="Run `mla-portable tune` again, or delete the row.",
            ) from error

    def times(self, implementation: Implementation, request: Request) -> Mapping[int, float]:
        """Rows -> microseconds of `implementation` for requests like this, as far as measured times rank here."""
        _check_pair("times", implementation, request)
        return {} if self._costs is None else self._costs.times(implementation, request)

    def prompt_times(self, decision: Decision) -> PromptTimes | None:
        """By which prompts go to what a decision on masked_prefill chose; None where no constants hold for its device.

        There are some only where measured times rank here.
        """
        check_type("Registry.prompt_times", "decision", decision, Decision, "a Decision, on masked_prefill")
        return recorded_prompts(self._prompts, decision.chosen or "", decision.request)

    def _log_once(self, decision: Decision) -> None:
        """Log, once per primitive and kind of reason, that a cheaper candidate was passed over or plain torch serves a GPU."""
        device = decision.request.device
        slow = decision.chosen == REFERENCE and decision.forced is None and device.device_type != "cpu"
        if not (decision.was_fallback or slow):
            return
        fitting = decision.causes
        key = (decision.request.primitive, tuple((v.implementation, r.subject, r.limit) for v in fitting for r in v.reasons))
        with self._lock:
            if key in self._logged:
                return
            if len(self._logged) >= CACHE_LIMIT:
                self._logged.clear()
            self._logged.add(key)
        # A kernel for other devices is no loss, nor a slow choice on a CPU; a GPU's own kernel left out, or a wrong one, is.
        wrong = any(reason.subject == "probe" for v in fitting for reason in v.reasons)
        missed = wrong or slow or (bool(fitting) and device.device_type != "cpu")
        logger.log(logging.WARNING if missed else logging.INFO, "%s", decision.text(all=False))


def _prompts_of(files: Iterable[TimesFile]) -> list[PromptRecord]:
    """Of all files, the newest last."""
    return sorted((each for file in files for each in file.prompts), key=lambda each: each.measurement.recorded)


def _check_pair(method: str, implementation: object, request: object) -> None:
    check_type(f"Registry.{method}", "implementation", implementation, Implementation, _IMPLEMENTATION)
    check_type(f"Registry.{method}", "request", request, Request, _REQUEST)


def _check_arguments(facts: object, policy: object, environ: object, probe: object, costs: object) -> None:
    """Those of a Registry, but for its plugins. Raises: InvalidArgument."""
    where, expected = "Registry", "a mapping of device names, such as 'cuda' or 'cuda:0', to DeviceFacts, or None"
    check_type(where, "facts", facts, (Mapping, type(None)), expected)
    for name, each in cast("Mapping[object, object]", facts or {}).items():
        check_type(where, "facts", name, str, expected)
        check_type(where, f"facts[{name!r}]", each, DeviceFacts, "DeviceFacts")
    check_type(where, "policy", policy, (Policy, type(None)), "a Policy, or None for that of environment and file")
    check_type(where, "environ", environ, (Mapping, type(None)), "a mapping of names to values, or None for os.environ")
    for name, value in cast("Mapping[object, object]", environ or {}).items():
        check_type(where, "environ", name, str, "names that are strings")
        check_type(where, f"environ[{name!r}]", value, str, "a string")
    check_flag(where, "probe", probe)
    if not (costs is None or (isinstance(costs, str) and costs == "measured") or hasattr(costs, "times")):
        refuse(where, "costs", describe(costs), "a CostTable, 'measured' or None")


def _seconds(environ: Mapping[str, str]) -> float:
    """The time limit for loading plugins; a malformed one is reported at every choice, not here."""
    try:
        return plugin_timeout(environ)
    except InvalidArgument:
        return DEFAULT_SECONDS


_registry: Registry | None = None
_building = False
_registry_lock = threading.RLock()


def get_registry() -> Registry:
    """The registry of this process, built at the first call: loads the installed plugins, reads environment and file.

    It ranks by the times that were measured on the device, where plugins bring any.

    Raises: PluginError when a plugin asks for it while registering.
    """
    global _registry, _building
    registry = _registry
    if registry is not None:
        return registry
    if _building and running():  # in the thread of a plugin's import, while another one builds and waits for it
        raise PluginError(_REENTERED)
    with _registry_lock:
        if _registry is None:
            if _building:
                raise PluginError(_REENTERED)
            _building = True
            try:
                _registry = Registry(costs="measured")
            finally:
                _building = False
        return _registry


def reset_registry() -> None:
    """Drop the registry of this process, with all that it chose and bound; the next `get_registry()` builds another. For tests.

    What callers keep (layers, bound callables) goes on to work.
    """
    global _registry
    with _registry_lock:
        _registry = None


_alive: WeakSet[Registry] = WeakSet()


def _after_fork() -> None:
    """Forget who held the locks: those threads do not exist in the child."""
    global _registry_lock, _building
    _registry_lock, _building = threading.RLock(), False
    for registry in list(_alive):
        registry.renew_locks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
