# SPDX-License-Identifier: Apache-2.0
"""Policy: what users asked for, in order of strength, and where each wish came from.

    argument `backend=`  >  `with use(...)`, inner before outer  >  MLA_PORTABLE_BACKEND_<PRIMITIVE>  >
    MLA_PORTABLE_BACKEND  >  default (automatic)

Within one layer a wish for one primitive is stronger than one for all. A wish names a backend ("triton"), one of its
variants ("triton.portable") or "auto", which asks for an automatic choice and so lifts weaker wishes. The environment is
read once, when a registry is built or `reload_policy()` is called; `use` holds for the current thread or task.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from mla_portable.choose.names import AUTO, closest
from mla_portable.choose.settings import ENV_BACKEND, ENV_DISABLE, backend_variables, value_of
from mla_portable.contracts import Implementation, InvalidArgument, Primitive, Reason, UnknownBackend

ARGUMENT: Final = "argument"
CONTEXT: Final = "use(...)"
DEFAULT: Final = "default"


@dataclass(frozen=True, slots=True)
class Rule:
    """One wish: `target` (a backend, a variant or "auto") for `primitive` (None means all), set by `control`."""

    target: str
    control: str
    primitive: Primitive | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """Every wish that holds.

    Attributes:
        rules: strongest first; the first that speaks of a primitive decides.
        disabled: (backend or variant, who disabled it), never chosen, not even where forced.
    """

    rules: tuple[Rule, ...] = ()
    disabled: tuple[tuple[str, str], ...] = ()

    def rule_for(self, primitive: Primitive) -> Rule:
        """The rule that decides for `primitive`; an automatic choice by default."""
        for rule in self.rules:
            if rule.primitive in (None, primitive):
                return rule
        return Rule(AUTO, DEFAULT)

    def against(self, implementation: Implementation) -> tuple[Reason, ...]:
        """The reasons against an implementation that is disabled; () where it is not."""
        return tuple(
            disabled_reason(name, control, implementation.name)
            for name, control in self.disabled
            if name in (implementation.backend, implementation.name)
        )

    def under(self, stronger: Iterable[Rule]) -> Policy:
        """This policy with stronger rules laid over it."""
        return Policy((*stronger, *self.rules), self.disabled)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Policy:
        """The policy of MLA_PORTABLE_BACKEND[_<PRIMITIVE>] and MLA_PORTABLE_DISABLE; an empty variable is not set."""
        rules = [
            Rule(value, name, primitive)
            for name, primitive in backend_variables().items()
            if (value := value_of(environ, name))
        ]
        if value := value_of(environ, ENV_BACKEND):
            rules.append(Rule(value, ENV_BACKEND))
        disabled = filter(None, map(str.strip, value_of(environ, ENV_DISABLE).split(",")))
        return cls(tuple(rules), tuple((name, ENV_DISABLE) for name in disabled))


def disabled_reason(name: str, control: str, what: str) -> Reason:
    """Why `what` does not run: `control` disables `name`, its own name or its backend's."""
    return Reason("disabled", f"by {control}", f"it names {name}", f"take {name} out of {control} to let {what} run")


class KnownNames:
    """Names that a wish may carry: of `backends` and `implementations`, and of plugins that are broken or disabled.

    Naming one of the latter (`unloaded`) is no typo: the refusal says what became of it.
    """

    def __init__(self, implementations: Iterable[str], unloaded: Iterable[str] = ()) -> None:
        """implementations: "<backend>.<variant>"."""
        self.implementations = tuple(sorted(set(implementations)))
        self.backends = tuple(sorted({name.partition(".")[0] for name in self.implementations}))
        self.unloaded = frozenset(unloaded)

    def __contains__(self, name: str) -> bool:
        return name in (AUTO, *self.backends, *self.implementations) or name.partition(".")[0] in self.unloaded


def check_names(policy: Policy, known: KnownNames) -> None:
    """Every target and every disabled name is known.

    Raises: UnknownBackend with the closest match and all known names, for the first that is not.
    """
    for name, control in policy.disabled:
        if name == AUTO:
            expected = f"names of backends or of their variants; {AUTO} asks for an automatic choice"
            raise InvalidArgument(control, "disable", got=repr(name), expected=expected)
    wishes = [(rule.target, rule.control) for rule in policy.rules] + list(policy.disabled)
    for name, control in wishes:
        if name not in known:
            backend = name.partition(".")[0]
            allowed = [each for each in known.implementations if "." in name and each.startswith(f"{backend}.")]
            raise UnknownBackend(
                control,
                "backend",
                got=repr(name),
                expected=f"one of {', '.join(allowed or (AUTO, *sorted({*known.backends, *known.unloaded})))}",
                remedy=closest(name, [AUTO, *known.backends, *known.implementations])
                or "`mla-portable doctor` lists what is installed.",
            )


_context: ContextVar[tuple[Rule, ...]] = ContextVar("mla_portable_use", default=())


def active_rules() -> tuple[Rule, ...]:
    """The rules of the `use(...)` blocks that surround the caller, inner before outer; compares equal when they do."""
    return _context.get()


@contextmanager
def use(backend: str | None = None, **per_primitive: str) -> Generator[None, None, None]:
    """Choose backends inside a `with` block, for the current thread or task.

        with use("triton", convert_indices="reference"): ...

    Args:
        backend: for every primitive: a backend, a variant of one, or "auto".
        per_primitive: the same by the name of a primitive; stronger than `backend`.
    Blocks nest; what an inner one says outweighs all that outer ones say. What it names must be known to the registry
    that serves the calls inside: a typo is UnknownBackend at the first choice. Callables bound earlier are not affected.
    A block ends by taking its own rules away, so blocks may be left in any order. It does not reach threads that are started
    inside it, nor executors: run their work in a copy of the context (`contextvars.copy_context().run`), or use a block
    there. Leave a block in the thread or task that entered it: a generator that is closed elsewhere takes nothing away.
    Raises: InvalidArgument for a keyword that is no primitive, or a value that is no name.
    """
    if not per_primitive.keys() <= set(Primitive.all()):
        from mla_portable.choose import get_registry

        get_registry()  # loads the plugins: one of them may bring the primitive
    names = [str(primitive) for primitive in Primitive.all()]
    for key, value in {"backend": backend, **per_primitive}.items():
        if key != "backend" and key not in names:
            raise InvalidArgument(
                "use", key, got="an unknown keyword", expected=f"a primitive: {', '.join(names)}", remedy=closest(key, names)
            )
        if not isinstance(value, str | None if key == "backend" else str) or value == "":
            raise InvalidArgument("use", key, got=repr(value), expected="the name of a backend or implementation")
    rules = [Rule(target, CONTEXT, Primitive.named(key)) for key, target in per_primitive.items()]
    if backend is not None:
        rules.append(Rule(backend, CONTEXT))
    _context.set((*rules, *_context.get()))
    try:
        yield
    finally:
        _context.set(tuple(rule for rule in _context.get() if not any(rule is own for own in rules)))
