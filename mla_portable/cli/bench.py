# SPDX-License-Identifier: Apache-2.0
"""`mla-portable bench kernels | prompts | selections | costs`: times of kernels and prompts, a model's selections, costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mla_portable.cli.failures import Commands
from mla_portable.cli.kernels import kernels
from mla_portable.cli.options import JsonOption, check_writable, help_of, in_help
from mla_portable.cli.output import columns, command, hanging
from mla_portable.cli.prompts import prompts

if TYPE_CHECKING:
    from mla_portable.judge.problems.selection_lists import LayerStatistics
    from mla_portable.times.records import MeasuredTime

bench = typer.Typer(cls=Commands, help="Time kernels on this machine, or make a plugin's costs of the times of a run.")
EXAMPLES = {
    "kernels": (
        "bench kernels --primitive sparse_decode --heads 16 --rows 1,16,128",
        "bench kernels --backend triton --all --out run.json.gz",
    ),
    "prompts": ("bench prompts --heads 16,128", "bench prompts --layout bf16 --head-dims 192,64,256"),
    "selections": ("bench selections glm.npz",),
    "costs": (
        "bench costs run.json.gz --backend nvidia --out costs/mydevice.json",
        "bench costs run.json.gz --out times/a100.json",
        "bench costs run.json.gz --beside vllm.indexer --out times/a100-indexer.json",
    ),
}


def _command(function: Callable[..., None]) -> Callable[..., None]:
    name = function.__name__
    return bench.command(name, help=help_of(function), epilog=in_help(EXAMPLES[name]))(function)


_command(kernels)
_command(prompts)


@_command
def selections(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Selections of a model, a .npz (docs/dev/bench.md).", exists=True, dir_okay=False),
    ],
    as_json: JsonOption = False,
) -> None:
    """Show how a model's indexer selects, layer by layer: what neighbouring tokens share, in which order, near or far."""
    with command(as_json=as_json, doing="reading the selections") as output:
        from mla_portable.judge.problems.selection_lists import NEAR, TILE, statistics_of
        from mla_portable.judge.problems.selections import read_selections

        read = read_selections(file)
        rows, numbers = len(read.seen), [int(each) for each in read.layers]
        layers = [statistics_of(read, layer) for layer in numbers]
        kept = None if read.index is None else read.index.layers.tolist()
        if as_json:
            facts = {"model": read.model, "made": read.made, "topk": read.topk, "rows": rows, "index_layers": kept}
            output.document({"command": "bench selections", "ok": True, **facts, "layers": layers})
            return
        sees = f"K {read.topk}; {rows} tokens, which see {read.seen.min()} to {read.seen.max()} keys"
        inputs = "not kept" if kept is None else f"of layers {', '.join(map(str, kept))}"
        labels = {"model": read.model, "made": read.made, "lists": sees, "inputs": f"of the indexer: {inputs}"}
        output.show(*(hanging(label, text) for label, text in labels.items()))
        headings = ["layer", "shared", "p10 to p90", "ascending", f"first {NEAR}", f"last {NEAR}", "distance", "side by side"]
        headings.append(f"distinct of {TILE}")
        output.show(columns(headings, map(_layer_row, layers), numbers=headings))


def _layer_row(layer: LayerStatistics) -> list[str]:
    low, high = layer.overlap_p10, layer.overlap_p90
    shares = layer.ascending, layer.first, layer.last, layer.distance, layer.side_by_side
    return [
        str(layer.layer),
        "" if layer.overlap is None else f"{layer.overlap:.2f}",
        "" if low is None or high is None else f"{low:.2f} to {high:.2f}",
        *(f"{share:.2f}" for share in shares),
        "" if layer.distinct is None else f"{layer.distinct:.1f} K",
    ]


@_command
def costs(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="The file of a run, which `bench kernels --out` writes.", exists=True, dir_okay=False
        ),
    ],
    backend: Annotated[
        str | None,
        typer.Option("--backend", metavar="NAME", help="Times of this backend alone, as its plugin ships them. Default: all."),
    ] = None,
    records: Annotated[
        Path | None, typer.Option("--records", metavar="DIR", help="Device profiles in DIR/profiles, beside those that ship.")
    ] = None,
    beside: Annotated[
        str | None,
        typer.Option(
            "--beside",
            metavar="ENGINE",
            help="Times of indexer_select alone, by the keys of a request, beside the fastest baseline's as ENGINE's own: "
            "vllm.indexer. By these an engine decides whose indexer serves a decode.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="Write it to a file, and leave the file alone after an error.", dir_okay=False
        ),
    ] = None,
) -> None:
    """Print the times of a run as a file that ranks implementations: one that a plugin ships, or one of your own."""
    with command(as_json=False, doing="reading the run") as output:
        if out is not None:
            check_writable(out, param_hint="--out")
        from mla_portable.bench.kernel_records import measured_times, selection_records
        from mla_portable.capability.profiles import all_profiles
        from mla_portable.capability.run import DISTURBED, read_run
        from mla_portable.kit.whole_files import replace_file
        from mla_portable.times.files import times_text

        timed = read_run(run)
        backends = sorted({each.implementation.partition(".")[0] for each in timed.times})
        theirs: list[MeasuredTime] = []
        if beside is None:
            found = measured_times(timed, all_profiles(records), backend)
        else:
            found, theirs = selection_records(timed, all_profiles(records), beside, backend)
        disturbed = timed.disturbed
        sizes = sorted({f"{each.primitive} of {each.rows} rows" for each in timed.times if each.problem in disturbed})
        if sizes:
            output.note(
                f"left out: {', '.join(sizes)}, where the 90th percentile of a time is more than {DISTURBED:g} times the 10th. "
                "Something disturbed them; time these sizes again"
            )
        if not found:
            if backend is not None and backend not in backends:
                has = f"has times of {', '.join(backends)}" if backends else "has no times"
                raise typer.BadParameter(f"{run.name} {has}, none of {backend}", param_hint="--backend")
            without = "has no time that counts: each is of a disturbed size, has an overlap or a model's selections"
            why = without if timed.times else "has no times"
            if beside is not None and timed.times:
                why = "has no undisturbed time of a decode's indexer_select beside a baseline, which vLLM and DeepGEMM bring"
            raise typer.BadParameter(f"{run.name} {why}; `bench kernels --out {run.name}` adds some", param_hint="RUN")
        if out is None:
            output.text(times_text(found, baselines=theirs))
        else:
            out.parent.mkdir(parents=True, exist_ok=True)
            replace_file(out, times_text(found, baselines=theirs).encode())
            output.note(f"written: {out}")
