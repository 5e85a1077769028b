# SPDX-License-Identifier: Apache-2.0
"""The typer application that the commands hang on."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from mla_portable._version import __version__
from mla_portable.cli.bench import bench
from mla_portable.cli.conform import conform
from mla_portable.cli.doctor.command import doctor
from mla_portable.cli.explain import explain
from mla_portable.cli.failures import Commands
from mla_portable.cli.kernels import tune
from mla_portable.cli.matrix import matrix
from mla_portable.cli.options import help_of, in_help
from mla_portable.cli.process import guarded
from mla_portable.cli.step import run
from mla_portable.cli.warm import warm

COMMANDS: Final = {
    doctor: ("doctor", "doctor --all", "doctor --engine http://localhost:8000", "doctor --engine serve.log --json"),
    explain: (
        "explain route --tp 8",
        "explain route --device a100 --all",
        "explain sparse_decode --heads 64 --layout bf16 --rows 128",
    ),
    matrix: ("matrix", "matrix h200", "matrix a100 --json"),
    run: ("run", "run --device cuda --heads 16 --kv-layout bf16", "run --backend sparse_decode=reference --all"),
    conform: ("conform triton --level smoke", "conform nvidia --primitive sparse_decode --out run.json.gz --jobs 4"),
    tune: ("tune --primitive sparse_decode --heads 16", "tune --out tuned.json"),
    warm: ("warm", "warm --heads 16 --heads 128 --layout fp8_ds_mla"),
}
"""The commands, and what they can be called with; `bench` has its own."""
app = typer.Typer(
    name="mla-portable",
    cls=Commands,
    help="Sparse MLA attention (DeepSeek-V3.2, GLM-5.x): what runs on this machine, whether it is right, and how fast it is. "
    "Exit codes: 0 all is well; 1 something is broken, wrong or cannot be served; 2 invalid arguments; "
    "130 interrupted by Ctrl-C, 143 by SIGTERM.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command, _examples in COMMANDS.items():
    app.command(help=help_of(_command), epilog=in_help(_examples))(_command)
app.add_typer(bench, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before the command."""


def main() -> None:
    """Entry point of `mla-portable`."""
    guarded(app)
