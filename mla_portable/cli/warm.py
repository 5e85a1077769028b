# SPDX-License-Identifier: Apache-2.0
"""`mla-portable warm`: compile what this device serves with, before an engine does at its start or at a first request."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from mla_portable.cli.options import JsonOption, ModelOption, check_known, model_named, resolve_device
from mla_portable.cli.output import EXIT_FAILED, columns, command, hanging

if TYPE_CHECKING:
    from mla_portable.bench.warm import CacheFolder, WarmReport


def warm(
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="DEVICE", help="torch's name: cuda, cuda:N, ... Default: the first accelerator."),
    ] = None,
    model: ModelOption = "deepseek-v3.2",
    heads: Annotated[
        list[int] | None,
        typer.Option("--heads", metavar="N", min=1, help="Query heads per GPU; repeatable. Default: of a rank of 8, and all."),
    ] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option("--layout", metavar="LAYOUT", help="Layout of the cache; repeatable. Default: those of the model."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compile every kernel that layers of a model run on this device, and keep it in the caches on disk.

    It runs each layer, its prompts and the indexer once at several sizes, so it needs the device. To start nodes without a
    compiler, copy the folders that it names to nodes with the same device and software.

    Exit code 1 when nothing can serve one of them.
    """
    with command(as_json=as_json) as output:
        where = resolve_device(device)
        if device is None and where.type == "cpu":
            from mla_portable.choose.facts import why_no_accelerator

            problem = f"must be given where there is no accelerator ({why_no_accelerator()}): the device itself compiles"
            tries = "`--device cpu` tries the command, and `python -m mla_portable_triton.compile_all sm80` compiles Triton's "
            raise typer.BadParameter(f"{problem}. {tries}kernels for an NVIDIA GPU elsewhere", param_hint="--device")
        from mla_portable.bench.warm import can_warm
        from mla_portable.bench.warm import warm as run
        from mla_portable.dispatch import current_registry
        from mla_portable.layouts import layout_names

        asked = model_named(model, can_warm)
        for each in layout or ():
            check_known(each, layout_names(), param_hint="--layout")
        with output.progress() as advance:
            report = run(
                where,
                registry=current_registry(),
                model=asked,
                heads=heads or asked.rank_heads,
                layouts=layout or asked.layouts,
                environ=os.environ,
                progress=advance,
            )
        if as_json:
            output.document({"command": "warm", "model": asked.name, **report.as_dict()})
        else:
            output.show(*_for_a_person(report))
        if not report.ok:
            raise typer.Exit(EXIT_FAILED)


def _for_a_person(report: WarmReport) -> Iterator[RenderableType]:
    yield hanging("device", str(report.facts))
    rows = [[each.what, f"{each.seconds:.1f}", each.served or "NOT SERVED"] for each in report.ran]
    yield columns(["what ran", "s", "served by"], rows, numbers=["s"])
    yield from (Text(f"{each.what}: {each.error}", "bold red") for each in report.ran if each.error)
    yield ""
    yield from (hanging("cache", _words(each)) for each in report.caches)
    new = sum(each.new for each in report.caches)
    seconds = sum(each.seconds for each in report.ran)
    nothing = " Everything was compiled before, or nothing is compiled for this device."
    yield f"{new} new files in {seconds:.1f} s." + ("" if new else nothing)


def _words(cache: CacheFolder) -> str:
    kernels = f": {', '.join(cache.names)}" if cache.names else ""
    return f"{cache.path}: {cache.files} files, {cache.new} of them new{kernels}"
