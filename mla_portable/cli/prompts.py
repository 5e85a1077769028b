# SPDX-License-Identifier: Apache-2.0
"""`mla-portable bench prompts`: a layer's prompts over latent rows and over keys of each head."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.text import Text

from mla_portable.cli.options import (
    DeviceOption,
    JsonOption,
    LayersOption,
    ModelOption,
    SelectionsOption,
    check_known,
    check_writable,
    model_named,
    numbers,
    resolve_device,
    selected_layers,
)
from mla_portable.cli.output import EXIT_FAILED, columns, command, digits, hanging

if TYPE_CHECKING:
    from mla_portable.bench.prompts import StepTimes
    from mla_portable.times.prompts import PromptRecord, PromptTimes

_SMALL: Final[dict[str, Any]] = {"topk": 64, "max_num_tokens": 128, "max_model_len": 128}
"""Of a layer on a CPU."""
_LIMITS: Final = {False: 0.02, True: 0.06}
"""Relative error between the two ways, by whether the cache is quantised: one of them attends to new tokens as they were."""


def prompts(
    device: DeviceOption = None,
    heads: Annotated[str | None, typer.Option("--heads", metavar="N,N", help="Head counts. Default: 8,16,32,64,128.")] = None,
    layout: Annotated[
        str, typer.Option("--layout", metavar="LAYOUT", help="Layout of the cache: fp8_ds_mla or bf16.")
    ] = "fp8_ds_mla",
    backend: Annotated[
        str | None, typer.Option("--backend", metavar="NAME", help="Force this backend where it has the primitive.")
    ] = None,
    model: ModelOption = "deepseek-v3.2",
    widths: Annotated[
        str | None,
        typer.Option(
            "--head-dims",
            metavar="P,R,V",
            help="Widths of a head, without rope, of rope, of values. Default: those of the model.",
        ),
    ] = None,
    selections: SelectionsOption = None,
    layers: LayersOption = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Timed runs of each.")] = 10,
    fit: Annotated[
        bool,
        typer.Option("--fit", help="Also print the constants of the choice that fit these times best, and choose by them."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="With --fit: add the constants to a file of times, in the place of those for the same heads and widths.",
            dir_okay=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Time a layer's prompts over latent rows and over keys of each head, projections included, and show the choice.

    Exit code 1 when the two results differ.
    """
    with command(as_json=as_json) as output:
        where = resolve_device(device)
        if out is not None and not fit:
            raise typer.BadParameter("needs --fit: what it writes are the constants that fit the times", param_hint="--out")
        if out is not None and selections is not None:
            why = "must not be given beside --selections: constants of a file of times are of random lists"
            raise typer.BadParameter(why, param_hint="--out")
        if out is not None:
            check_writable(out, param_hint="--out")
        selected, by_layers = selected_layers(selections, layers)
        lists = [None] if selected is None else [(selected, layer) for layer in by_layers]
        from mla_portable.attention import HeadDims
        from mla_portable.bench.origin import measured_here
        from mla_portable.bench.prompts import STEPS, can_time, make_layer, time_step
        from mla_portable.bench.prompts import fit as fitted
        from mla_portable.dispatch import current_registry
        from mla_portable.layouts import LAYOUTS, layout_names
        from mla_portable.times.adding import add_to_file, check_can_add
        from mla_portable.times.prompts import PromptRecord

        check_known(layout, layout_names(), param_hint="--layout")
        asked = model_named(model, can_time)
        dims = numbers(widths, "--head-dims") or asked.head_dims
        if len(dims) != 3:
            raise typer.BadParameter(f"must be three numbers (got {widths!r})", param_hint="--head-dims")
        counts = numbers(heads, "--heads") or (8, 16, 32, 64, 128)
        size: dict[str, Any]
        if where.type == "cpu":
            steps, size = (((40, 40),) * 2, ((70, 70),), ((20, 90),)), _SMALL
        else:
            steps, size = STEPS, dict[str, Any](topk=asked.topk)
        facts = current_registry().facts(where)
        if out is not None:
            check_can_add("bench prompts", out, facts.name)
        found: dict[int, list[StepTimes]] = {}
        constants: dict[int, PromptTimes] = {}
        served: dict[str, list[int]] = {}
        records: list[PromptRecord] = []
        unknown: list[int] = []
        with output.progress() as advance:
            for number, count in enumerate(counts):
                advance(f"{count} heads", number, len(counts))
                layer = make_layer(where, num_heads=count, layout=layout, head_dims=HeadDims(*dims), backend=backend, **size)
                found[count] = [time_step(layer, step, repeat=repeat, selected=each) for each in lists for step in steps]
                times, masked = layer.per_head.times, layer.per_head.decisions["masked"].chosen
                unknown += [count] if times is None and not fit else []
                constants[count] = fitted(found[count]) if fit or times is None else times
                if out is not None and masked is not None:
                    records.append(
                        PromptRecord(masked, dims[0] + dims[1], dims[2], count, constants[count], measured_here(facts))
                    )
                per_head = ", ".join(f"{name} {each.chosen}" for name, each in layer.per_head.decisions.items())
                route = layer.latent.route_decision.verdict
                latent = ", ".join(f"{part.role} {part.decision.chosen}" for part in route.parts)
                served.setdefault(f"latent rows by {latent}; keys of each head by {per_head}", []).append(count)
        limit = _LIMITS[LAYOUTS[layout].is_quantized]
        ok = all(each.error <= limit for times in found.values() for each in times)
        if unknown:
            heads_without = ", ".join(map(str, unknown))
            output.note(f"no times on record here for {heads_without} heads: the choice is by constants that fit these times")
        if out is not None and records and ok:
            damaged = add_to_file(out, prompts=records)
            if damaged is not None:
                output.note(f"{out} could not be used as a whole; what it held is in {damaged}")
            output.note(f"constants of {len(records)} head counts added to {out}")
        if as_json:
            lines = [_line(count, each, constants[count]) for count, times in found.items() for each in times]
            fits = {str(count): asdict(each) for count, each in constants.items()}
            output.document({"command": "bench prompts", "ok": ok, "layout": layout, "constants": fits, "lines": lines})
        else:
            headings = ["heads", "prompts", "latent rows, us", "keys of each head, us", "chosen", "loses", "error"]
            rows = [_row(_line(count, each, constants[count])) for count, times in found.items() for each in times]
            if selected is not None:
                headings.append("keys selected as by")
                output.note(f"selections of {selected.model}: {selected.made}")
            output.show(hanging("device", str(facts)))
            output.show(*(hanging("served", f"{', '.join(map(str, heads))} heads: {who}") for who, heads in served.items()))
            output.show(columns(headings, rows, numbers=[*headings[2:4], *headings[5:7]]))
            if fit:
                output.show(*(hanging(f"{count} heads", _words(each)) for count, each in constants.items()))
            if not ok:
                output.show(Text(f"WRONG  the two ways differ by more than {limit}", "bold red"))
        if not ok:
            raise typer.Exit(EXIT_FAILED)


def _words(times: PromptTimes) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in asdict(times).items())


def _line(heads: int, times: StepTimes, constants: PromptTimes) -> dict[str, Any]:
    per_head = constants.saves(times.counts, masked=times.masked) > 0
    taken, best = times.per_head_us if per_head else times.latent_us, min(times.latent_us, times.per_head_us)
    return {
        "heads": heads,
        "prompts": times.name,
        "latent_us": times.latent_us,
        "per_head_us": times.per_head_us,
        "masked": times.masked,
        "selection": times.selection,
        "chosen": "keys of each head" if per_head else "latent rows",
        "loses": taken / best - 1,
        "error": times.error,
    }


def _row(line: dict[str, Any]) -> list[str]:
    us = f"{digits(line['per_head_us'])}" + ("" if line["masked"] else ", dense")
    return [
        str(line["heads"]),
        line["prompts"],
        digits(line["latent_us"]),
        us,
        line["chosen"],
        f"{line['loses']:.1%}",
        f"{line['error']:.1e}",
        *([line["selection"]] if line["selection"] else []),
    ]
