#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What runs say, as pages and pictures.

ci/release/bench.py page [--write] [--records DIR]
    docs/benchmarks.md with its pictures and docs/accuracy.md, made of the runs DIR/<release>/*.json.gz, by default capability/;
    without --write the pages are printed
ci/release/bench.py engines RUN
    the times and mixed loads of engines in a run, as `ci/gpu_vllm --rank --record` and `--serve --record` write them, as tables
    in Markdown
ci/release/bench.py accuracy RUN
    what engines make of a trained model's text, as `ci/gpu_accuracy --record` writes it, as tables in Markdown
ci/release/bench.py plot RUN FILE.svg [--primitive NAME] [--heads N,N] [--topk N,N]
    times over rows: the fastest implementation, triton.portable, the fastest baseline and the roofline bound
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from accuracy_page import accuracy_pages, accuracy_tables
from engine_tables import load_tables, origin, time_tables
from page import benchmark_pages
from plot import picture_of

from mla_portable.capability.run import read_run
from mla_portable.errors import MLAPortableError

ROOT = Path(__file__).parents[2]


def write_page(records: Path, docs: Path | None) -> None:
    """Write the pages and their pictures into a folder; without one print the pages."""
    pages = benchmark_pages(records) | accuracy_pages(records)
    if docs is None:
        print("\n".join(text for name, text in pages.items() if name.endswith(".md")), end="")
        return
    for name, text in pages.items():
        (docs / name).write_text(text, encoding="utf-8")
    print(f"written: {', '.join(pages)}")


def show_engines(path: Path) -> None:
    """Raises: SystemExit for a run without times or loads of engines."""
    run = read_run(path)
    tables = [*time_tables(run), *load_tables(run)]
    if not tables:
        raise SystemExit(
            f"{path.name} has no times of engines; `ci/gpu_vllm --rank --record FILE` adds them, `--serve --record FILE` loads"
        )
    print("\n\n".join([origin(run), *tables]))


def show_accuracy(path: Path) -> None:
    """Raises: SystemExit for a run without figures of a trained model."""
    run = read_run(path)
    tables = list(accuracy_tables(run))
    if not tables:
        raise SystemExit(f"{path.name} has no figures of a trained model; `ci/gpu_accuracy --record FILE` adds them")
    print("\n\n".join([origin(run), *tables]))


def plot(path: Path, out: Path, primitive: str, heads: frozenset[int], topk: frozenset[int]) -> None:
    """Draw the times of a run. heads, topk: of what is drawn; all where there is none. Raises: SystemExit for no time."""
    if out.suffix != ".svg":
        raise SystemExit(f"{out} must end in .svg; a browser, Inkscape or rsvg-convert makes a .png or .pdf of it")
    run = read_run(path)
    times = [each for each in run.times if each.primitive == primitive]
    times = [each for each in times if not heads or each.heads in heads]
    times = [each for each in times if not topk or each.topk in topk]
    if not times:
        raise SystemExit(f"no such times of {primitive} in {path.name}")
    out.write_text(picture_of(times, f"{run.device_name}, {run.date}").svg, encoding="utf-8")
    print(f"drawn: {out}, {len(times)} times")


def numbers(text: str) -> frozenset[int]:
    return frozenset(map(int, text.split(",")))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    page = commands.add_parser("page")
    page.add_argument("--write", action="store_true")
    page.add_argument("--records", type=Path, metavar="DIR", default=ROOT / "capability")
    engines = commands.add_parser("engines")
    engines.add_argument("run", type=Path)
    accuracy = commands.add_parser("accuracy")
    accuracy.add_argument("run", type=Path)
    picture = commands.add_parser("plot")
    picture.add_argument("run", type=Path)
    picture.add_argument("file", type=Path)
    picture.add_argument("--primitive", default="sparse_decode")
    picture.add_argument("--heads", type=numbers, default=frozenset[int](), metavar="N,N")
    picture.add_argument("--topk", type=numbers, default=frozenset[int](), metavar="N,N")
    options = parser.parse_args(arguments)
    try:
        if options.command == "page":
            write_page(options.records, ROOT / "docs" if options.write else None)
        elif options.command == "engines":
            show_engines(options.run)
        elif options.command == "accuracy":
            show_accuracy(options.run)
        else:
            plot(options.run, options.file, options.primitive, options.heads, options.topk)
    except MLAPortableError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
