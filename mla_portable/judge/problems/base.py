# SPDX-License-Identifier: Apache-2.0
"""Problems: everything that a primitive is tried with, as one value; the parameters of a case; the cases of a level.

Cases are generated from what an implementation declares: only what it claims, all of what it claims. A case that does not apply
is not generated, so nothing is skipped while the suite runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from mla_portable.contracts import DeviceFacts, Implementation, InvalidArgument, Primitive, Request, Support
from mla_portable.judge.problems.compare import Finding, Tolerance
from mla_portable.judge.problems.cover import Choice, anything, covering
from mla_portable.judge.problems.draw import seed_of
from mla_portable.judge.problems.shapes import layout_of_storage, unpacked
from mla_portable.judge.problems.stage import Problem

if TYPE_CHECKING:
    from typing_extensions import Self

    from mla_portable.judge.problems.bench import Bench

STRENGTH: Final = {"smoke": 1, "quick": 2, "full": 3}
"""How many values of different axes meet in the cases of a level, see `cover.covering`."""
LEVELS: Final = tuple(STRENGTH)
"""smoke: a handful of cases, seconds. quick: every pair of values of all axes, and every special scene. full: the cross
product of shapes with everything else spread over it; meant for GPUs."""


_HALF: Final = "fp16"
_FEATURES: Final = frozenset(each.name for each in fields(Request) if each.default is False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(ABC):
    """The parameters of a case. Subclasses add a primitive's own.

    Attributes:
        run: "once"; "repeat", two calls that must agree bit for bit; "graph", captured, then replayed on other inputs;
            "batches", rows in batches of several sizes, which must agree bit for bit.
        accuracy: the class by whose tolerances results are judged (`Support.accuracy`).
    """

    primitive: ClassVar[Primitive[Any]]
    run: str = "once"
    accuracy: str = "standard"

    asks: ClassVar[str] = ""
    """What a request states, "field" or "field=parameter"; a feature is asked for by any word but "none"."""
    says: ClassVar[str]
    """Templates for the words of an id, of one field each; without "!" at the end, usual values go unsaid."""

    def words(self) -> list[str]:
        """The parameters as words of an id."""
        usual = {each.name: each.default for each in fields(self)}
        found: list[str] = []
        for template in f"{self.says} {{accuracy}} {{run}}".split():
            name = template[template.index("{") + 1 : template.index("}")]
            value = getattr(self, name)
            if template.endswith("!") or (value != usual.get(name) and value is not None and value is not False):
                word = "" if value is True else _HALF if value is torch.float16 else value
                found.append(template.rstrip("!").format(**{name: word}))
        return found

    @classmethod
    def asked(cls, device: DeviceFacts, values: Mapping[str, Any]) -> Request:
        """What some parameters, by name, ask of the registry."""
        stated: dict[str, Any] = {}
        for word in cls.asks.split():
            field, _, name = word.partition("=")
            if (name or field) in values:
                value = values[name or field]
                if field == "kv_layout":
                    value = layout_of_storage(value)
                elif field in _FEATURES and isinstance(value, str):
                    value = value != "none"
                stated[field] = value
        return Request(cls.primitive, device, **stated)

    @classmethod
    def claimed(cls, implementation: Implementation, device: DeviceFacts, choice: Choice) -> bool:
        """Nothing in a partial choice speaks against the implementation's own declaration."""
        reasons = implementation.support.shape_reasons(cls.asked(device, unpacked(choice)))
        return not any(True for _ in reasons)

    @classmethod
    def of(cls, choice: Choice) -> Self:
        """The parameters for a choice of values, a storage among them."""
        return cls(**unpacked(choice))

    @classmethod
    def covering(
        cls,
        implementation: Implementation,
        device: DeviceFacts,
        axes: Mapping[str, Sequence[Any]],
        *,
        strength: int,
        allowed: Callable[[Choice], bool] = anything,
        seeds: Iterable[Choice] = (),
    ) -> list[Self]:
        """`cover.covering` of what the implementation claims; [] where an axis has no value."""

        def claimed(choice: Choice) -> bool:
            return allowed(choice) and cls.claimed(implementation, device, choice)

        chosen = covering(axes, strength=strength, allowed=claimed, seeds=seeds) if all(axes.values()) else ()
        return [cls.of(choice) for choice in chosen]

    def request(self, device: DeviceFacts) -> Request:
        """What this case asks of the registry."""
        names = [*(word.rpartition("=")[2] for word in self.asks.split()), *(each.name for each in fields(self))]
        asked = self.asked(device, {name: getattr(self, name) for name in names})
        return asked.but(graph=self.run == "graph", batch_invariant=self.run == "batches")

    @abstractmethod
    def build(self, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:
        """The problem on a device. The same seed gives the same values on every device."""


def one_variant(name: str) -> Callable[[Request, Support], Iterator[tuple[str, Request]]]:
    """A probe of a single problem."""

    def variants(request: Request, support: Support) -> Iterator[tuple[str, Request]]:
        yield name, request

    return variants


@dataclass(frozen=True, slots=True, kw_only=True)
class Problems:
    """What a primitive is tried with, and by what its results are judged.

    Attributes:
        primitive: whose. oracle: its meaning in float64, with the arguments of its Protocol; see `exact`.
        tolerances: (storage, quantity) -> limit.
        findings: (storage, results by name, expected ones by name) -> comparisons; the judge of every problem.
        params: (implementation, device, level) -> the parameters of a conformance level's cases.
        sizes: the Request fields that give its shapes. of_request: the probe's parameters, with those sizes and the features
            of a request.
        variants: the probe's problems of the smallest sizes: (name, request) with every feature that a Support declares.
        rows: of the probe's problem where a request leaves them open.
        bench: what is timed; None where nothing is.
    """

    primitive: Primitive[Any]
    oracle: Callable[..., Any]
    tolerances: Mapping[tuple[str, str], Tolerance]
    findings: Callable[..., Iterator[Finding]]
    params: Callable[[Implementation, DeviceFacts, str], Iterable[Params]]
    of_request: Callable[[Request, str], Params]
    variants: Callable[[Request, Support], Iterator[tuple[str, Request]]]
    sizes: tuple[str, ...] = ()
    rows: int | None = None
    bench: Bench | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One test of one implementation.

    Attributes:
        implementation: its full name. params: everything that the inputs follow from, together with the seed.
        request: what the implementation is bound for.
    """

    implementation: str
    params: Params
    request: Request

    @property
    def primitive(self) -> Primitive[Any]:
        return self.params.primitive

    @property
    def id(self) -> str:
        """Reads aloud, e.g. `sparse_decode[triton.portable-fp8_ds_mla-pow2-h16-k2048-b64-s1-holes]`."""
        return f"{self.primitive}[{'-'.join([self.implementation, *self.params.words()])}]"

    @property
    def seed(self) -> int:
        """A hash of the id without the implementation: every implementation is given the same data."""
        return seed_of(f"{self.primitive}[{'-'.join(self.params.words())}]")

    def __str__(self) -> str:
        return self.id


def check_level(where: str, level: str) -> None:
    """Raises InvalidArgument, which names the levels, when `level` is none of them."""
    if level not in LEVELS:
        raise InvalidArgument(where, "level", got=repr(level), expected=f"one of {', '.join(LEVELS)}")


def cases_for(implementation: Implementation, device: DeviceFacts, level: str) -> tuple[Case, ...]:
    """Every case of a level, in a fixed order, for what `implementation` declares of itself on this device.

    Args:
        level: "smoke", "quick" or "full" (`LEVELS`).
    Returns: () where the implementation does not claim the device at all, or its primitive has no problems.
    """
    check_level("cases_for", level)
    problems = implementation.primitive.problems
    if problems is None or any(True for _ in implementation.support.device_reasons(device)):
        return ()
    cases: dict[str, Case] = {}
    for params in problems.params(implementation, device, level):
        params = replace(params, accuracy=implementation.support.accuracy)
        request = params.request(device)
        if not implementation.support.reasons(request):
            case = Case(implementation.name, params, request)
            cases.setdefault(case.id, case)
    return tuple(cases.values())


def tolerances() -> dict[tuple[Primitive[Any], str, str], Tolerance]:
    """(primitive, storage, quantity) -> limit, for every primitive that is known."""
    return {
        (primitive, storage, quantity): row
        for primitive in Primitive.all()
        if primitive.problems is not None
        for (storage, quantity), row in primitive.problems.tolerances.items()
    }


def tolerance_table_markdown() -> str:
    """The table for docs/dev/accuracy.md, generated so that page and suite cannot disagree."""
    lines = ["| primitive | read from | quantity | abs | rel | of | 1 - cosine | why |", "|---|---|---|---|---|---|---|---|"]
    for (primitive, storage, quantity), row in tolerances().items():
        cosine = "" if row.cosine is None else f"{row.cosine:.3g}"
        limits = "bit for bit | | |" if row.exact else f"{row.abs:.3g} | {row.rel:.3g} | {row.magnitude} |"
        lines.append(f"| {primitive} | {storage} | {quantity} | {limits} {cosine} | {row.origin} |")
    return "\n".join(lines)
