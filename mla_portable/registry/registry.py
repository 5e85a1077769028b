# SPDX-License-Identifier: Apache-2.0
"""Registry: plugins, machine and policy in one place; it answers who serves a request.

A process has one, built at its first use by `get_registry()`; a test builds its own, with plugins, devices and a policy of
its choice. A bound callable is the implementation's own and never comes back here. The functions of `mla_portable.api` ask for
`choice_token` in each call, to notice a changed policy.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final
from weakref import WeakSet

import torch

from mla_portable.contracts import (
    BoundPrimitive,
    Decision,
    DeviceFacts,
    Implementation,
    InvalidArgument,
    PluginError,
    Primitive,
    Reason,
    Request,
    UnsupportedRequest,
)
from mla_portable.registry.costs import packaged_costs
from mla_portable.registry.machine import YARDSTICK, Machine
from mla_portable.registry.plugins import PluginReport, given_plugins, installed_plugins, load_plugins
from mla_portable.registry.policy import ARGUMENT, Policy, Rule, active_rules, check_names, known_names
from mla_portable.registry.probe import ProbeReport
from mla_portable.registry.select import CostTable, decide

__all__ = ["Registry", "get_registry", "reset_registry"]

CACHE_LIMIT: Final = 4096
"""Choices and bound callables that are kept; beyond that all are dropped and made again as needed."""

logger = logging.getLogger("mla_portable.registry")

_Key = tuple[Request, "str | None", tuple[Rule, ...]]


class Registry:
    """Answers who serves a request, and why not the others.

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
        costs: CostTable | None = None,
    ) -> None:
        """Load plugins and read the policy; no device is touched.

        Args:
            plugins: (name, module or object with the hook, or a module's name) instead of the installed entry points.
            facts: devices to simulate, by torch name ("cuda" stands for every index of it). On a device that is not
                here declarations alone decide: neither `check` nor a probe looks at the machine that is.
            policy: instead of environment and policy file. environ: instead of os.environ.
            probe: False trusts `check` and computes nothing.
            costs: measured costs, which replace declared preferences; None where only these count.
        A broken plugin or policy does not raise here: `plugin_reports` tells of the one, every choice raises the other.
        """
        loaded = load_plugins(installed_plugins() if plugins is None else given_plugins(plugins))
        order = {primitive: rank for rank, primitive in enumerate(Primitive)}
        self._implementations = tuple(sorted(loaded.implementations, key=lambda i: (order[i.primitive], i.preference, i.name)))
        self._reports = loaded.reports
        self._known = known_names((i.name for i in self._implementations), (r.name for r in self._reports if not r.ok))
        self._machine = Machine(
            detectors=loaded.detectors,
            yardsticks=(i for i in self._implementations if i.name == YARDSTICK),
            simulated=facts,
        )
        self._probing, self._costs = probe, costs
        self._given_policy, self._environ = policy, environ
        self._policy = Policy()
        self._policy_error: InvalidArgument | None = None
        self._generation = 0
        self._names_checked: set[tuple[Rule, ...]] = set()
        self._selected: dict[_Key, tuple[Implementation, Decision]] = {}
        self._bound: dict[_Key, BoundPrimitive] = {}
        self._logged: set[object] = set()
        self._lock = threading.RLock()
        try:
            self.reload_policy()
        except InvalidArgument as error:
            self._policy_error = error
        _follow_forks(self)

    def renew_locks(self) -> None:
        """Forget who held the locks: for the child of a fork, where those threads do not exist."""
        self._lock = threading.RLock()
        self._machine.renew_lock()

    def implementations(self, primitive: Primitive | None = None) -> tuple[Implementation, ...]:
        """All that loaded plugins offer (for one primitive), by primitive, declared preference and name."""
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

    @property
    def policy(self) -> Policy:
        """What environment and file, or the constructor, demand; without `use(...)` blocks and arguments.

        Raises: InvalidArgument or UnknownBackend when that is malformed or names what is unknown.
        """
        if self._policy_error is not None:
            raise self._policy_error.with_traceback(None)
        return self._policy

    def reload_policy(self) -> None:
        """Read environment and policy file again. Callables that are already bound stay as they are.

        Raises: InvalidArgument or UnknownBackend; the old policy stays in force then.
        """
        environ = os.environ if self._environ is None else self._environ
        policy = Policy.read(environ) if self._given_policy is None else self._given_policy
        check_names(policy, self._known)
        with self._lock:
            self._policy, self._policy_error = policy, None
            self._generation += 1
            self._selected.clear()
            self._bound.clear()

    def choice_token(self) -> object:
        """A cheap hashable value; while it stays equal, equal requests get equal choices. For caches in front of `bind`."""
        return self._generation, active_rules()

    def facts(self, device: torch.device | str) -> DeviceFacts:
        """The facts of a device, gathered once; simulated ones as they were given.

        Raises: InvalidArgument when the device is neither simulated nor here.
        """
        return self._machine.facts(device)

    def probe(self, implementation: Implementation, device: torch.device | str, *, layout: str | None = None) -> ProbeReport:
        """Check, bind and compute tiny problems, once per implementation, layout and device.

        Args:
            layout: one cache layout; None means every one that the implementation declares.
        Raises: InvalidArgument when the device is simulated, not here or under graph capture; out of memory and device
            faults as they come, to be met again at the next call.
        """
        return self._machine.probe(implementation, torch.device(device), layout)

    def decide(self, request: Request, *, backend: str | None = None, probe: bool = True, thorough: bool = False) -> Decision:
        """Who serves `request`, and why not the others.

        Args:
            backend: overrides every other wish. probe: False computes nothing. thorough: look at every candidate, for an
                explanation, instead of as far as the choice needs.
        Raises: UnknownBackend for a name that nobody carries; errors of the device that a probe runs into.
        A request that nothing can serve is no error here: `chosen` is None.
        """
        stronger = active_rules() if backend is None else (Rule(backend, ARGUMENT), *active_rules())
        policy = self.policy.under(stronger)
        if stronger not in self._names_checked:
            check_names(Policy(stronger), self._known)
            self._names_checked.add(stronger)
        machine, device = self._machine, self._machine.device_of(request.device)

        def check(implementation: Implementation) -> tuple[Reason, ...]:
            return machine.check(implementation, request.device)

        def try_out(implementation: Implementation) -> tuple[Reason, ...]:
            assert device is not None
            return machine.probe(implementation, device, request.kv_layout).reasons

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

    def select(self, request: Request, *, backend: str | None = None) -> tuple[Implementation, Decision]:
        """The implementation that serves `request`, and the decision; remembered for equal requests.

        Raises: UnsupportedRequest with all reasons when nothing, or not the forced backend, can; as `decide` otherwise.
        """
        key = (request, backend, active_rules())
        known = self._selected.get(key)
        if known is not None:
            return known
        generation = self._generation
        decision = self.decide(request, backend=backend)
        if decision.chosen is None:
            raise UnsupportedRequest(decision)
        chosen = next(i for i in self.implementations(request.primitive) if i.name == decision.chosen)
        self._log_once(decision)
        with self._lock:
            if generation == self._generation:
                if len(self._selected) >= CACHE_LIMIT:
                    self._selected.clear()
                self._selected[key] = chosen, decision
        return chosen, decision

    def bind(self, request: Request, *, backend: str | None = None) -> BoundPrimitive:
        """The callable that serves `request`, exactly as its implementation made it; the same one for equal requests.

        It runs on the current device: who has several GPUs makes the tensors' own the current one around a call.

        Raises: as `select`, and whatever the implementation's own `bind` raises.
        """
        key = (request, backend, active_rules())
        bound = self._bound.get(key)
        if bound is not None:
            return bound
        generation = self._generation
        implementation, _ = self.select(request, backend=backend)
        bound = implementation.bind(request)
        with self._lock:
            if generation == self._generation:
                if len(self._bound) >= CACHE_LIMIT:
                    self._bound.clear()
                bound = self._bound.setdefault(key, bound)
        return bound

    def _log_once(self, decision: Decision) -> None:
        """Tell, once per primitive and kind of reason, that a cheaper candidate was passed over."""
        if not decision.was_fallback:
            return
        cost = next(v.cost for v in decision.verdicts if v.implementation == decision.chosen)
        passed = [v for v in decision.verdicts if v.reasons and v.cost < cost]
        key = (decision.request.primitive, tuple((v.implementation, r.subject, r.limit) for v in passed for r in v.reasons))
        with self._lock:
            if key in self._logged:
                return
            self._logged.add(key)
        # A kernel for other devices is no loss, nor a slow choice on a CPU; a GPU's own kernel left out, or a wrong one, is.
        device = decision.request.device
        supports = {i.name: i.support for i in self.implementations(decision.request.primitive)}
        fitting = [v for v in passed if not any(supports[v.implementation].device_reasons(device))]
        wrong = any(reason.subject == "probe" for v in fitting for reason in v.reasons)
        missed = wrong or (bool(fitting) and device.device_type != "cpu")
        logger.log(logging.WARNING if missed else logging.INFO, "%s", decision.text())


_registry: Registry | None = None
_building = False
_registry_lock = threading.RLock()
_alive: WeakSet[Registry] = WeakSet()
_following_forks = False


def get_registry() -> Registry:
    """The registry of this process, built at the first call: loads the installed plugins, reads environment and file.

    It ranks by the costs that were measured on the device, where the package has any.

    Raises: PluginError when a plugin asks for it while registering.
    """
    global _registry, _building
    registry = _registry
    if registry is not None:
        return registry
    with _registry_lock:
        if _registry is None:
            if _building:
                raise PluginError("the registry was asked for while it is being built: a plugin's hook may only register")
            _building = True
            try:
                _registry = Registry(costs=packaged_costs())
            finally:
                _building = False
        return _registry


def reset_registry() -> None:
    """Drop the registry of this process; the next `get_registry()` builds another. For tests."""
    global _registry
    with _registry_lock:
        _registry = None


def _follow_forks(registry: Registry) -> None:
    """Give every living registry fresh locks in the child of a fork."""
    global _following_forks
    _alive.add(registry)
    if not _following_forks and hasattr(os, "register_at_fork"):
        _following_forks = True
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    global _registry_lock, _building
    _registry_lock, _building = threading.RLock(), False
    for registry in list(_alive):
        registry.renew_locks()
