# SPDX-License-Identifier: Apache-2.0
"""Policy: what users asked for, in order of strength, and where each wish came from.

    argument `backend=`  >  `with use(...)`, inner before outer  >  MLA_PORTABLE_BACKEND_<PRIMITIVE>  >
    MLA_PORTABLE_BACKEND  >  the file that MLA_PORTABLE_POLICY names  >  default (automatic)

Within one layer a wish for one primitive is stronger than one for all. A wish names a backend ("triton"), one of its
variants ("triton.portable") or "auto", which asks for an automatic choice and so lifts weaker wishes. Environment and file
are read once, when a registry is built or `reload_policy()` is called; `use` holds for the current thread or task.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]  installed with Python 3.10 only

from mla_portable.contracts import Implementation, InvalidArgument, Primitive, Reason, UnknownBackend
from mla_portable.registry.names import AUTO, closest
from mla_portable.registry.settings import (
    ENV_BACKEND,
    ENV_DISABLE,
    ENV_POLICY,
    backend_variables,
    path_of,
    read_text_file,
    value_of,
)

ARGUMENT: Final = "argument"
CONTEXT: Final = "use(...)"
DEFAULT: Final = "default"
_MOST_BYTES: Final = 64 << 10
_MOST_CHARACTERS: Final = 1000
"""Of a policy file, and of a line in it: `tomllib` takes quadratic time for a dotted key, 12 s for one of 32,000 characters."""


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
    def read(cls, environ: Mapping[str, str]) -> Policy:
        """The policy of environment variables and of the file that MLA_PORTABLE_POLICY names.

        Raises: InvalidArgument for a key or value that means nothing, and for a file that cannot be read.
        """
        policy = cls.from_environment(environ)
        path = path_of(environ, ENV_POLICY)
        if path is None:
            return policy
        weaker = cls.from_file(path)
        return cls(policy.rules + weaker.rules, policy.disabled + weaker.disabled)

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
        return cls(tuple(rules), _disabled(environ))

    @classmethod
    def from_file(cls, path: Path) -> Policy:
        """The policy of a TOML file:

            [backend]
            default = "triton"
            sparse_decode = "nvidia.flashmla"
            disable = ["reference"]

        Raises: InvalidArgument when the file cannot be read, is no TOML, or holds a key or value that means nothing.
        """
        where = _policy_file(path)
        document = _document(path)
        _require_keys(where, document, ["backend"])
        table = document.get("backend", {})
        if not isinstance(table, dict):
            raise InvalidArgument(where, "backend", got=repr(table), expected="a table")
        wishes = cast(dict[str, Any], table)
        _require_keys(f"{where} [backend]", wishes, ["default", "disable", *(str(p) for p in Primitive.all())])
        disable = wishes.pop("disable", [])
        if not isinstance(disable, list) or not all(isinstance(name, str) for name in cast(list[Any], disable)):
            raise InvalidArgument(where, "disable", got=repr(cast(Any, disable)), expected="a list of names")
        for key, value in wishes.items():
            if not isinstance(value, str) or not value.strip():
                raise InvalidArgument(where, key, got=repr(value), expected="the name of a backend or implementation")
        rules = [Rule(value.strip(), where, Primitive.named(key)) for key, value in wishes.items() if key != "default"]
        if "default" in wishes:
            rules.append(Rule(wishes["default"].strip(), where))
        return cls(tuple(rules), tuple((name.strip(), where) for name in cast(list[str], disable)))


def _policy_file(path: Path) -> str:
    return f"policy file {path}"


def _document(path: Path) -> dict[str, Any]:
    """The content of a TOML file. Raises: InvalidArgument."""
    try:
        text = read_text_file(path, _MOST_BYTES)
        for number, line in enumerate(text.split("\n"), 1):
            if len(line) > _MOST_CHARACTERS:
                raise ValueError(f"line {number} has {len(line)} characters, more than {_MOST_CHARACTERS}")
        return tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:  # TOML that is malformed or nested too deeply is among them
        expected = "a readable TOML file with a [backend] table"
        raise InvalidArgument(ENV_POLICY, "file", got=f"{path}: {error}", expected=expected) from error


def _disabled(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((word.strip(), ENV_DISABLE) for word in value_of(environ, ENV_DISABLE).split(",") if word.strip())


def disabled_reason(name: str, control: str, what: str) -> Reason:
    """Why `what` does not run: `control` disables `name`, its own name or its backend's."""
    return Reason("disabled", f"by {control}", f"it names {name}", f"take {name} out of {control} to let {what} run")


def disabled_plugins(environ: Mapping[str, str], policy: Policy | None = None) -> dict[str, str]:
    """Names that are disabled -> what disables them, read before plugins are loaded, so before their primitives are known.

    What is malformed is reported when the policy is read.
    """
    found = _disabled(environ) if policy is None else policy.disabled
    file = path_of(environ, ENV_POLICY)
    if file is not None and policy is None:
        with suppress(InvalidArgument, KeyError, TypeError, AttributeError):
            found += tuple((name.strip(), _policy_file(file)) for name in _document(file)["backend"]["disable"])
    return dict(reversed(found))


def _require_keys(where: str, table: Mapping[str, Any], allowed: list[str]) -> None:
    for key in table:
        if key not in allowed:
            raise InvalidArgument(
                where, key, got="an unknown key", expected=f"one of {', '.join(allowed)}", remedy=closest(key, allowed)
            )


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
        from mla_portable.registry import get_registry

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
