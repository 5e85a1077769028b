# SPDX-License-Identifier: Apache-2.0
"""`mla-portable bench kernels | prompts | costs | engines | page | plot`: what kernels and prompts take here; times of runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from mla_portable.cli.failures import Commands
from mla_portable.cli.kernels import kernels
from mla_portable.cli.options import JsonOption, check_name, check_picture, check_writable, help_of, in_help, numbers
from mla_portable.cli.output import command
from mla_portable.cli.prompts import prompts

bench = typer.Typer(cls=Commands, help="Time kernels on this machine, or show the times of a run.")
EXAMPLES = {
    "kernels": (
        "bench kernels --primitive sparse_decode --heads 16 --rows 1,16,128",
        "bench kernels --backend triton --all --out run.json.gz",
    ),
    "prompts": ("bench prompts --heads 16,128", "bench prompts --layout bf16 --head-dims 192,64,256"),
    "costs": (
        "bench costs run.json.gz --backend nvidia --out costs/mydevice.json",
        "bench costs run.json.gz --out times/a100.json",
    ),
    "engines": ("bench engines run.json.gz",),
    "page": ("bench page", "bench page --write"),
    "plot": ("bench plot run.json.gz decode.svg --primitive sparse_decode --heads 16",),
}


def _command(function: Callable[..., None]) -> Callable[..., None]:
    name = function.__name__
    return bench.command(name, help=help_of(function), epilog=in_help(EXAMPLES[name]))(function)


_command(kernels)
_command(prompts)

RunArgument = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="The file of a run, which `bench kernels --out` writes.", exists=True, dir_okay=False),
]


@_command
def costs(
    run: RunArgument,
    backend: Annotated[
        str | None,
        typer.Option("--backend", metavar="NAME", help="Times of this backend alone, as its plugin ships them. Default: all."),
    ] = None,
    records: Annotated[
        Path | None, typer.Option("--records", metavar="DIR", help="Device profiles in DIR/profiles, beside those that ship.")
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
        from mla_portable.bench.kernel_records import measured_times
        from mla_portable.capability.profiles import all_profiles
        from mla_portable.capability.run import DISTURBED, read_run
        from mla_portable.contracts.whole_files import replace_file
        from mla_portable.times.files import times_text

        timed = read_run(run)
        backends = sorted({each.implementation.partition(".")[0] for each in timed.times})
        found = measured_times(timed, all_profiles(records), backend)
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
            why = (
                "has no times" if not timed.times else "has no time that counts: each is of a disturbed size or has an overlap"
            )
            raise typer.BadParameter(f"{run.name} {why}; `bench kernels --out {run.name}` adds some", param_hint="RUN")
        if out is None:
            output.text(times_text(found))
        else:
            out.parent.mkdir(parents=True, exist_ok=True)
            replace_file(out, times_text(found).encode())
            output.note(f"written: {out}")


@_command
def engines(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="The file of a run, as `ci/gpu_vllm --rank --record` writes.", exists=True, dir_okay=False
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Print the times of engines in a run as tables in Markdown: first tokens, decode steps, GPU time by kind of kernel."""
    with command(as_json=as_json, doing="reading the run") as output:
        from mla_portable.bench.engine_tables import engine_tables
        from mla_portable.capability.run import read_run

        read = read_run(run)
        if not read.engine_times:
            problem = f"{run.name} has no times of engines; `ci/gpu_vllm --rank --record FILE` adds them"
            raise typer.BadParameter(problem, param_hint="RUN")
        if as_json:
            times = [each.model_dump(mode="json") for each in read.engine_times]
            output.document({"command": "bench engines", "ok": True, "engine_times": times})
            return
        output.text(engine_tables(read))


@_command
def page(
    write: Annotated[
        bool, typer.Option("--write", help="Write docs/benchmarks.md and its pictures. Default: print the page.")
    ] = False,
    records: Annotated[
        Path | None,
        typer.Option("--records", metavar="DIR", help="The runs DIR/<release>/*.json.gz. Default: of this checkout."),
    ] = None,
) -> None:
    """Make the page of benchmarks from runs: engines, kernels beside baselines, prompts, the indexer."""
    with command(as_json=False, doing="reading runs") as output:
        from mla_portable.bench.page import PAGE, benchmark_pages
        from mla_portable.capability.matrix import records_folder

        folder = records_folder(records)
        pages = benchmark_pages(folder)
        if not write:
            output.text(pages[PAGE])
            return
        docs = folder.parent / "docs"
        if not docs.is_dir():
            raise typer.BadParameter(f"there is no {docs}; the page belongs to a checkout", param_hint="--write")
        for name, text in pages.items():
            (docs / name).write_text(text, encoding="utf-8")
        output.note(f"written: {', '.join(pages)}")


@_command
def plot(
    run: RunArgument,
    out: Annotated[Path, typer.Argument(metavar="FILE", help="The picture, an .svg.", dir_okay=False)],
    primitive: Annotated[
        str, typer.Option("--primitive", metavar="PRIMITIVE", help="The primitive that is drawn.")
    ] = "sparse_decode",
    heads: Annotated[str | None, typer.Option("--heads", metavar="N,N", help="Head counts. Default: all.")] = None,
    topk: Annotated[str | None, typer.Option("--topk", metavar="N,N", help="Top-k widths. Default: all.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Draw times over rows: the fastest implementation, triton.portable, the fastest baseline and the roofline bound."""
    with command(as_json=as_json, doing="reading the run") as output:
        check_picture(out, param_hint="FILE")
        by_heads, by_topk = numbers(heads, "--heads"), numbers(topk, "--topk")
        check_name("primitive", primitive, param_hint="--primitive")
        from mla_portable.bench.plot import picture_of
        from mla_portable.capability.run import read_run

        read = read_run(run)
        times = [each for each in read.times if each.primitive == primitive]
        times = [each for each in times if by_heads is None or each.heads in by_heads]
        times = [each for each in times if by_topk is None or each.topk in by_topk]
        if not times:
            raise typer.BadParameter(f"no such times of {primitive} in {run.name}", param_hint="RUN")
        out.write_text(picture_of(times, f"{read.device_name}, {read.date}").svg, encoding="utf-8")
        if as_json:
            output.document({"command": "bench plot", "ok": True, "file": out, "times": len(times)})
        output.note(f"drawn: {out}")
