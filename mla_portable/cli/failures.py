# SPDX-License-Identifier: Apache-2.0
"""How a command fails: a message in one style on stderr, one JSON document on stdout where --json asks for it, an exit code."""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from mla_portable.cli.output import EXIT_FAILED, EXIT_USAGE
from mla_portable.cli.process import EXIT_INTERRUPTED, undisturbed
from mla_portable.errors import InvalidArgument, MLAPortableError, printable

_UsageError: Final[Any] = typer.BadParameter.__base__
"""click's; typer exports only the subclass, and brings click along in one version and depends on it in another."""
_NOT_A_VALUE: Final = {"int_parsing": "an integer", "float_parsing": "a number"}
"""pydantic's kind of an error -> what was expected."""
_NO_CHOICE: Final = re.compile(r"'(.*?)' is not one of (.*?)\.?$")
_NO_FILE: Final = re.compile(r"file '(.*?)' does not exist", re.IGNORECASE)


class Commands(TyperGroup):
    """The commands of mla-portable. Every failure of any of them ends here.

    Exit code 2 for invalid arguments, 130 for an interrupt, 1 for every other failure of mla_portable. Anything else is a
    defect: its traceback goes to stderr, and with --json it is a document as well.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Without a command, show which there are."""
        return super().parse_args(ctx, args or ["--help"])

    def main(self, args: Sequence[str] | None = None, *others: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run the command that `args` name, and end the process with its exit code."""
        words = list(sys.argv[1:] if args is None else args)
        if os.environ.get("COLUMNS") == "0":  # "not known", as in shutil.get_terminal_size; rich would print nothing
            del os.environ["COLUMNS"]
        try:
            code = super().main(words, *others, standalone_mode=False, **extra)
        except typer.Abort as error:  # typer makes that of an EOFError, and some versions of a user's interrupt
            code = _fail(error.__cause__, self, words) if isinstance(error.__cause__, EOFError) else EXIT_INTERRUPTED
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # a panic of an extension module is no Exception
            code = _fail(error, self, words)
        if standalone_mode:
            sys.exit(code)
        return code


def _fail(error: BaseException, group: TyperGroup, words: Sequence[str]) -> int:
    """Say what went wrong. Returns: the exit code. Raises: a defect, unless it has become a document."""
    as_json = _wants_json(words)
    usage = isinstance(error, (_UsageError, InvalidArgument))
    path, command = _named(group, words)
    message = printable(_words(error, command))  # words of a plugin or a server may be in it
    if not usage and not isinstance(error, MLAPortableError):
        if not as_json:
            raise error
        sys.stderr.write(printable("".join(traceback.format_exception(error))))
    stderr = Console(stderr=True)
    stderr.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=not stderr.is_terminal)
    if usage:
        stderr.print(Text(f"Try '{' '.join(('mla-portable', *path))} --help'."))
    if as_json:
        document = {"ok": False, "error": {"type": _kind(error), "message": message}}
        with undisturbed():
            sys.stdout.write(json.dumps(document, indent=2) + "\n")
            sys.stdout.flush()
    return EXIT_USAGE if usage else EXIT_FAILED


def _kind(error: BaseException) -> str:
    """The error's class for a program: a value that is refused while options are read is refused like any other."""
    return InvalidArgument.__name__ if isinstance(error, _UsageError) else type(error).__name__


def _wants_json(words: Sequence[str]) -> bool:
    return "--json" in words


def _named(group: Any, words: Sequence[str]) -> tuple[list[str], Any]:
    """The names of the command that the words ask for, and the command."""
    path: list[str] = []
    for word in words:
        below = getattr(group, "commands", {}).get(word)
        if below is None:
            break
        path.append(word)
        group = below
    return path, group


def _words(error: BaseException, command: Any) -> str:
    """The message: for the value of an option or argument its name first, what is allowed, what was given, what to do."""
    if isinstance(error, InvalidArgument):
        named = next((each for each in command.params if each.name == error.argument), None)
        return str(error) if named is None else _refusal(_shown(named), error.expected, error.got, error.remedy)
    if not isinstance(error, typer.BadParameter) or not error.message:
        in_words: Callable[[], str] = getattr(error, "format_message", error.__str__)
        return in_words()
    if error.param is None:
        return f"{error.param_hint} {error.message}"
    if isinstance(error.__cause__, ValidationError):
        return _converted(_shown(error.param), error.__cause__)
    return _reworded(_shown(error.param), error.message)


def _converted(name: str, error: ValidationError) -> str:
    """A text that is no value of an option's type, or out of its range; only the first of several."""
    found = error.errors()[0]
    given, limits = str(found["input"]), found.get("ctx", {})
    if "ge" in limits:
        return _refusal(name, f"at least {limits['ge']:g}", given)
    if found["type"] in _NOT_A_VALUE:
        return _refusal(name, _NOT_A_VALUE[found["type"]], repr(given))
    return _reworded(name, found["msg"].removeprefix("Value error, "))


def _reworded(name: str, message: str) -> str:
    """A refusal of typer's, in this project's words where it is of a choice or a file."""
    choice, absent = _NO_CHOICE.match(message), _NO_FILE.match(message)
    if choice is not None:
        return _refusal(name, f"one of {choice[2].replace(chr(39), '')}", repr(choice[1]))
    return _refusal(name, "a file that is there", repr(absent[1])) if absent is not None else f"{name}: {message}"


def _refusal(name: str, expected: str, got: str, remedy: str = "") -> str:
    return f"{name} must be {expected} (got {got})" + (f". {remedy}" if remedy else "")


def _shown(parameter: Any) -> str:
    """An option as it is written, an argument as help names it."""
    names = [name for name in parameter.opts if name.startswith("--")]
    return names[0] if names else str(parameter.name).upper()
