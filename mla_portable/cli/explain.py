# SPDX-License-Identifier: Apache-2.0
"""`mla-portable explain`: which implementation serves a request, and every reason against each of the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import RenderableType

from mla_portable.cli.elsewhere import Elsewhere, find_profile
from mla_portable.cli.options import BackendOption, JsonOption, check_name, primitive_named, resolve_device, with_options
from mla_portable.cli.output import EXIT_FAILED, EXIT_OK, command, hanging
from mla_portable.cli.verdicts import cost_lines, decision_lines, route_lines
from mla_portable.features import Features, Promises
from mla_portable.models import DEEPSEEK_V32

if TYPE_CHECKING:
    from mla_portable.attention import RouteDecision
    from mla_portable.contracts import Decision, DeviceFacts
    from mla_portable.times.configurations import Configured

_FLAGS = [each for each in (*fields(Features), *fields(Promises)) if each.metadata["words"]]
"""What a call needs or promises that implementations declare or need."""
_TYPICAL: dict[str, Any] = {
    "kv_layout": "fp8_ds_mla",
    "index_layout": "index_fp8",
    "block_size": 64,
    "scale_format": "pow2",
    "num_heads": DEEPSEEK_V32.rank_heads[0],
    "topk": DEEPSEEK_V32.topk,
    "query_len": 1,
    "qk_head_dim": DEEPSEEK_V32.qk_head_dim,
    "v_head_dim": DEEPSEEK_V32.head_dims[2],
    "rows": None,
    **{each.name: each.default for each in _FLAGS},
    "lse": True,
    "selection": True,
    "ordered": True,
}
"""Facts of a call, with the values of a DeepSeek-V3.2 rank of eight; a primitive's own values come before."""
_OPTION = {"num_heads": "--heads", "kv_layout": "--layout", "attn_sink": "--sink"}
_ROUTE = "route"
_UNKNOWN = "unknown"
_OF_ROUTES: dict[str, Any] = {"rows": 256, "lse": False}
"""What a layer in vLLM asks for: no lse, and as many requests as vLLM schedules at once by default."""
_MAX_NUM_TOKENS = 8192
"""Of a step, by vLLM's default."""


def _words_of(field: str) -> str:
    """The option of a fact."""
    return _OPTION.get(field, f"--{field.replace('_', '-')}")


def _option(field: str, text: str, *, of: Any = int, metavar: str | None = None) -> Any:
    least, metavar, words = (1, "N", _words_of(field)) if of is int else (None, metavar, _words_of(field))
    if of is bool and _TYPICAL[field]:
        words += words.replace("--", "/--no-", 1)
        text += f" Default: yes{'; for a route no' if _OF_ROUTES.get(field) is False else ''}."
    return Annotated[of | None, typer.Option(words, metavar=metavar, min=least, help=text, rich_help_panel="The call")]


_CALL = {
    "num_heads": _option("num_heads", "Query heads per GPU. Default: 16; for the indexer 64."),
    "tp": _option("tp", "GPUs that share DeepSeek-V3.2's 128 query heads, instead of --heads. Default: 8."),
    "topk": _option("topk", "Indices per token. Default: 2048."),
    "kv_layout": _option(
        "kv_layout", "Layout of the cache or the workspace: fp8_ds_mla (default), bf16, ...", of=str, metavar="LAYOUT"
    ),
    "index_layout": _option(
        "index_layout",
        "Layout of the indexer's cache beside it: index_fp8 (default), index_bf16, ...",
        of=str,
        metavar="LAYOUT",
    ),
    "block_size": _option("block_size", "Tokens per block. Default: 64."),
    "scale_format": _option(
        "scale_format",
        "Kind of FP8 scales: pow2 (default), amax, or unknown, which is read as amax.",
        of=Literal["pow2", "amax", "unknown"],
        metavar="FORMAT",
    ),
    "query_len": _option("query_len", "Tokens per decode. Default: 1."),
    "qk_head_dim": _option("qk_head_dim", "Width of a head's queries and keys. Default: 192."),
    "v_head_dim": _option("v_head_dim", "Width of a head's values. Default: 128."),
    "rows": _option(
        "rows", "Query rows of the call, where costs depend on them; for a route, requests that decode at once (default 256)."
    ),
    **{each.name: _option(each.name, each.metadata["words"], of=bool) for each in _FLAGS},
}
"""By the names of Request's fields."""


@with_options(_CALL)
def explain(
    primitive: Annotated[
        str,
        typer.Argument(
            help="A primitive, such as sparse_decode (`mla-portable doctor --all` lists all), or 'route': what a whole "
            "layer would use."
        ),
    ],
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="torch's name: cpu, cuda, cuda:N, ...; or a device profile, such as a100-80g, for a device not here. "
            "Default: the first accelerator, else the CPU.",
        ),
    ] = None,
    backend: BackendOption = None,
    records: Annotated[
        Path | None,
        typer.Option(
            "--records",
            metavar="DIR",
            help="Device profiles in DIR/profiles and runs in DIR/<release>, for a device that is not here.",
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="With route: every candidate for each of its parts.")] = False,
    as_json: JsonOption = False,
    *,
    options: dict[str, Any],
) -> None:
    """Show which implementation would serve a call, and every reason against each of the others.

    Candidates are probed, as before a first call. For a device that is not here nothing is probed.

    Exit code 1 when nothing can serve the call, or the forced backend cannot.
    """
    with command(as_json=as_json) as output:
        _share_heads(primitive, options)
        if primitive != _ROUTE:
            check_name("primitive", primitive, param_hint="PRIMITIVE")
        if backend is not None:
            check_name("backend", backend, param_hint="--backend")
        if "kv_layout" in options:
            check_name("layout", options["kv_layout"], param_hint="--layout")
        ask = _ask_for_route if primitive == _ROUTE else _ask_for_primitive
        elsewhere = None if device is None else find_profile(device, records)
        where = device if elsewhere is None else elsewhere.profile.device_facts()
        decision = ask(primitive, where, backend, options)
        beside = _ask_for_the_rest(decision, backend)
        served = decision.chosen is not None
        if as_json:

            def answered(each: Decision | RouteDecision) -> dict[str, Any]:
                return {**each.as_dict(), "checked": True} if elsewhere is None else elsewhere.document(each)

            output.document(
                {
                    "command": "explain",
                    "ok": served,
                    "primitive": primitive,
                    "arguments": _arguments(decision),
                    "tuned": None if (tuned := _tuned(decision)) is None else dict(tuned.configuration),
                    **answered(decision),
                    **{name: answered(each) for name, each in beside.items()},
                }
            )
        else:
            output.show(*_for_a_person(decision, beside, elsewhere, every=every))
        raise typer.Exit(EXIT_OK if served else EXIT_FAILED)


def _for_a_person(
    decision: Decision | RouteDecision, beside: Mapping[str, Decision], elsewhere: Elsewhere | None, *, every: bool
) -> Iterator[RenderableType]:
    from mla_portable.contracts import Decision

    state = elsewhere and elsewhere.state
    if elsewhere:
        yield elsewhere.head()
    if isinstance(decision, Decision):
        yield from decision_lines(decision, state)
        tuned = _tuned(decision)
        if tuned:
            yield hanging("tuned", f"{' '.join(f'{name}={value}' for name, value in tuned.configuration)} ({tuned.file})")
        yield from cost_lines([decision])
    else:
        yield from route_lines(decision, beside, state, every=every)
        if every or decision.chosen is None:
            yield from cost_lines(part.decision for each in decision.verdicts for part in each.parts)


def _ask_for_primitive(name: str, device: str | DeviceFacts | None, backend: str | None, given: dict[str, Any]) -> Decision:
    """The decision on one primitive; `device` as torch or the registry names it, or facts."""
    from mla_portable.contracts import Primitive
    from mla_portable.explaining import explain as ask

    name = primitive_named(name, param_hint="PRIMITIVE")
    primitive = Primitive.named(name)
    known = (*primitive.facts, *primitive.stated, "graph")
    defaults = {field: value for field, value in {**_TYPICAL, **primitive.typical}.items() if field in known}
    _refuse_others(name, given, defaults)
    asked = {**defaults, **given}
    if asked.get("scale_format") == _UNKNOWN or asked.get("kv_layout") == "bf16":
        asked.pop("scale_format", None)
    if name == "sparse_prefill" and asked["kv_layout"] == "bf16" and "block_size" not in given:
        asked["block_size"] = None  # a workspace, or a cache seen as flat rows
    return ask(name, device=device, backend=backend, **asked)


def _ask_for_route(name: str, device: str | DeviceFacts | None, backend: str | None, given: dict[str, Any]) -> RouteDecision:
    """How a layer would compose the primitives."""
    from mla_portable.attention import AttentionSpec
    from mla_portable.attention.layer_registry import LayerRegistry
    from mla_portable.attention.routes import choose_route
    from mla_portable.dispatch import current_registry

    specified = {each.name for each in fields(AttentionSpec)} | {"query_len", *_OF_ROUTES}
    defaults = {field: value for field, value in {**_TYPICAL, **_OF_ROUTES}.items() if field in specified}
    _refuse_others(name, given, defaults)
    asked = {**defaults, **given}
    if asked["scale_format"] == _UNKNOWN:
        asked["scale_format"] = None
    query_len, num_reqs = asked.pop("query_len"), asked.pop("rows")
    spec = AttentionSpec(
        softmax_scale=DEEPSEEK_V32.softmax_scale,
        max_num_tokens=max(_MAX_NUM_TOKENS, num_reqs * query_len),
        max_num_reqs=num_reqs,
        max_model_len=DEEPSEEK_V32.max_model_len,
        decode_query_len=query_len,
        need_lse=asked.pop("lse"),
        **asked,
    )
    registry = current_registry()
    demand = LayerRegistry(registry, backend)
    if device is None or isinstance(device, str):
        device = registry.facts(device or resolve_device(None))
    return choose_route(spec, device, demand)


def _ask_for_the_rest(decision: Decision | RouteDecision, backend: str | None) -> dict[str, Decision]:
    """What a layer in an engine asks for beside a route; empty but for a route.

    prompts: attention of prompts over keys of each head; absent where an engine's plugin does not take that way, or nothing
    serves it. indexer: the selection of keys, where the engine's own indexer does not make it.
    """
    from mla_portable.contracts import Decision

    if isinstance(decision, Decision):
        return {}
    from mla_portable.attention.layer_registry import LayerRegistry
    from mla_portable.attention.prompts import HeadDims, prompt_requests
    from mla_portable.dispatch import current_registry
    from mla_portable.engines.common.asked import indexer_requests
    from mla_portable.engines.common.prompt_route import refusals

    spec, facts, head_dims = decision.spec, decision.device, HeadDims()
    registry = current_registry()
    layers = LayerRegistry(registry, backend)
    found: dict[str, Decision] = {}
    if not refusals(spec, head_dims, facts, registry=registry, backend=backend):
        prompts = layers.decide(prompt_requests(spec, head_dims, facts)["masked"])
        found = {"prompts": prompts} if prompts.chosen and layers.prompt_times(prompts) else {}
    select, _ = indexer_requests(facts, spec.topk, ordered=spec.batch_invariant)
    return {**found, "indexer": layers.decide(select)}


def _arguments(decision: Decision | RouteDecision) -> dict[str, Any]:
    """What was asked, as an object; "request" in the same document is its text."""
    from mla_portable.contracts import Decision

    if not isinstance(decision, Decision):
        return asdict(decision.spec)
    names = [each.name for each in fields(decision.request) if each.name not in ("primitive", "device")]
    return {name: getattr(decision.request, name) for name in names}


def _tuned(decision: Decision | RouteDecision) -> Configured | None:
    """The configuration that files of times have for the chosen implementation; None without one, and for a route."""
    from mla_portable.contracts import Decision
    from mla_portable.dispatch import current_registry

    if not isinstance(decision, Decision):
        return None
    registry = current_registry()
    chosen = registry.chosen(decision)
    return chosen and registry.tuned(chosen, decision.request)


def _share_heads(name: str, given: dict[str, Any]) -> None:
    """Turn `--tp` into heads of a rank. Raises: typer.BadParameter."""
    ranks = given.pop("tp", None)
    if ranks is None:
        return
    if name.startswith("indexer"):
        raise typer.BadParameter("does not apply to the indexer: every rank has all of its heads", param_hint="--tp")
    if "num_heads" in given:
        raise typer.BadParameter("says the same as --heads; give one of them", param_hint="--tp")
    if DEEPSEEK_V32.heads % ranks:
        raise typer.BadParameter(f"must be a divisor of {DEEPSEEK_V32.heads} heads (got {ranks})", param_hint="--tp")
    given["num_heads"] = DEEPSEEK_V32.heads // ranks


def _refuse_others(name: str, given: dict[str, Any], allowed: dict[str, Any]) -> None:
    for field in given:
        if field not in allowed:
            known = ", ".join(map(_words_of, allowed))
            raise typer.BadParameter(f"does not apply to {name} (valid: {known})", param_hint=_words_of(field))
