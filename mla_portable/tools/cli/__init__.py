# SPDX-License-Identifier: Apache-2.0
"""The command line: `mla-portable doctor | explain | run | conform | bench`, a file per command."""

from mla_portable.tools.cli.app import app, main

__all__ = ["app", "main"]
