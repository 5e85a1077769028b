# SPDX-License-Identifier: Apache-2.0
"""The command line, a file for each command. It needs the extra `cli`."""

from __future__ import annotations

from mla_portable.cli.process import ended_by_signals, open_streams

__all__ = ["main"]

_EXTRA = ("pydantic", "rich", "typer")


def main() -> None:
    """Entry point of `mla-portable`. Raises: SystemExit with what to install where the extra is missing."""
    open_streams()
    with ended_by_signals():
        try:
            from mla_portable.cli.app import main as run
        except ModuleNotFoundError as error:
            if error.name not in _EXTRA:
                raise
            raise SystemExit(
                f"mla-portable needs {error.name}, which is not installed here; "
                "install the extra: pip install 'mla-portable[cli]'"
            ) from None
        run()
