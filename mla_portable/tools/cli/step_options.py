# SPDX-License-Identifier: Apache-2.0
"""The options that size a step, for the commands that run one, and the values they stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mla_portable.tools.cli.options import resolve_device

if TYPE_CHECKING:
    from mla_portable.tools.bench.step import StepReport
    from mla_portable.tools.cli.output import Output

__all__ = [
    "BlockSizeOption",
    "CheckRowsOption",
    "ContextOption",
    "DecodeQueryLenOption",
    "DecodesOption",
    "DemandOption",
    "HeadsOption",
    "KvLayoutOption",
    "PrefillTokensOption",
    "PrefillsOption",
    "RouteOption",
    "ScaleFormatOption",
    "SeedOption",
    "TopkOption",
    "chosen_step",
]

_STEP = "Size of the step"
_CACHE = "Cache"

HeadsOption = Annotated[
    int | None,
    typer.Option("--heads", help="Query heads of this rank. Default: 16 on a CPU, 128 on a GPU.", rich_help_panel=_STEP),
]
TopkOption = Annotated[int | None, typer.Option("--topk", help="Indices per token. Default: 2048.", rich_help_panel=_STEP)]
DecodesOption = Annotated[
    int | None, typer.Option("--decodes", help="Requests that decode. Default: 8 on a CPU, 64 on a GPU.", rich_help_panel=_STEP)
]
DecodeQueryLenOption = Annotated[
    int | None,
    typer.Option("--query-len", help="Tokens per decode, above 1 for speculative decoding. Default: 1.", rich_help_panel=_STEP),
]
PrefillsOption = Annotated[
    int | None, typer.Option("--prefills", help="Requests that prefill; the first is fresh. Default: 2.", rich_help_panel=_STEP)
]
PrefillTokensOption = Annotated[
    int | None,
    typer.Option("--prefill-tokens", help="Tokens per prefill. Default: 64 on a CPU, 512 on a GPU.", rich_help_panel=_STEP),
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        "--context",
        help="Cached tokens of the longest request; the others have an eighth of it or more. Default: 4096 on a CPU, "
        "8192 on a GPU.",
        rich_help_panel=_STEP,
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option("--seed", help="Random seed; gives the same step on every device. Default: 0.", rich_help_panel=_STEP),
]
BlockSizeOption = Annotated[
    int | None, typer.Option("--block-size", help="Tokens per block. Default: 64.", rich_help_panel=_CACHE)
]
KvLayoutOption = Annotated[
    str | None, typer.Option("--kv-layout", metavar="LAYOUT", help="fp8_ds_mla (default) or bf16.", rich_help_panel=_CACHE)
]
ScaleFormatOption = Annotated[
    str | None,
    typer.Option("--scale-format", metavar="FORMAT", help="Of FP8 scales: pow2 (default) or amax.", rich_help_panel=_CACHE),
]
DemandOption = Annotated[
    list[str] | None,
    typer.Option(
        "--backend",
        metavar="[PRIMITIVE=]NAME",
        help="Force a backend ('triton') or one implementation ('triton.portable'), for everything or for one primitive; "
        "may be repeated. A forced choice never falls back. Default: the registry chooses.",
    ),
]
RouteOption = Annotated[
    str, typer.Option("--route", metavar="ROUTE", help="auto, fused, split, direct or upconvert: how primitives are composed.")
]
CheckRowsOption = Annotated[
    int, typer.Option("--check-rows", min=0, help="Attention rows that the float64 oracle computes; 0 for all of them.")
]


def chosen_step(
    output: Output,
    *,
    device: str | None,
    backend: list[str] | None,
    route: str,
    repeat: int,
    check_rows: int,
    max_seconds: float | None = None,
    **sizes: int | str | None,
) -> StepReport:
    """Run the step that the options choose.

    Args:
        output: where progress is shown. device, backend: what `--device` and `--backend` say. route, repeat, check_rows,
            max_seconds: as in `run_step`. sizes: fields of StepShape, None for the default of the device.
    Raises: typer.BadParameter and InvalidArgument for invalid options; otherwise as `run_step`.
    """
    where = resolve_device(device)
    demand = _demanded(backend)
    from mla_portable.dispatch import current_registry
    from mla_portable.tools.bench.inputs import default_shape
    from mla_portable.tools.bench.step import run_step

    given: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
    shape = replace(default_shape(where.type), **given)
    with output.progress() as advance:
        return run_step(
            shape,
            device=where,
            registry=current_registry(),
            backend=demand,
            route=route,
            repeat=repeat,
            check_rows=check_rows,
            max_seconds=max_seconds,
            progress=advance,
        )


def _demanded(words: list[str] | None) -> str | dict[str, str] | None:
    """What `--backend` demands: one name for everything, or names by primitive.

    Raises: typer.BadParameter when both kinds are mixed, or two names are given for the same thing.
    """
    if not words:
        return None
    if len(words) == 1 and "=" not in words[0]:
        return words[0]
    by_primitive: dict[str, str] = {}
    for word in words:
        primitive, equals, name = word.partition("=")
        if not equals or not primitive or not name:
            raise typer.BadParameter(
                f"got {word!r} beside others, expected PRIMITIVE=NAME: one name for everything stands alone",
                param_hint="--backend",
            )
        if primitive in by_primitive:
            raise typer.BadParameter(f"{primitive} is given twice", param_hint="--backend")
        by_primitive[primitive] = name
    return by_primitive
