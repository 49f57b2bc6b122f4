"""Prints the output of commands, and turns errors into exit codes."""

import errno
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from collapipe.errors import CollapipeError, InvalidInputError, NotFoundError
from collapipe.printable import indented, printable

_UNLIMITED = 100_000
FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
"""The exit codes of the command; 0 means success."""


class Terminal(Console):
    """A console that shows text as it is: neither rich nor the terminal obeys what words of other machines contain."""

    _kept = "\n\t"

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text, self._kept), **options)


class _TableTerminal(Terminal):
    _kept = ""  # A line break would begin what looks like another row.


def print_json(document: Any) -> None:
    """Prints a document as one line of JSON."""
    print(json.dumps(document), flush=True)


def say(message: str) -> None:
    """Prints a text without markup or wrapping."""
    Terminal().print(message, soft_wrap=True)


def complain(message: str) -> None:
    """Prints a text to stderr, like `say`."""
    Terminal(stderr=True).print(message, soft_wrap=True)


def page_line(link: str) -> str:
    """Says where the page of a local testbed is. The link is that of `Workspace.page_link`."""
    return f"page for your browser: {link} (this address works once; `collapipe status` prints the next one)"


def plain_table(*columns: str) -> Table:
    """Returns an empty table without borders."""
    return Table(*columns, box=None, pad_edge=False, header_style="bold")


def print_table(table: Table, width: int | None = None) -> None:
    """Prints a table with its texts as they are, like `say`.

    Args:
        width: In characters. `None` takes that of the terminal. Elsewhere, each line is as long as it needs, so nothing is cut.
    """
    console = _TableTerminal(width=width)
    if width is None and not console.is_terminal and "COLUMNS" not in os.environ:
        unlimited = console.options.update_width(_UNLIMITED)
        console.width = max(console.width, Measurement.get(console, unlimited, table).maximum)
    console.print(table)


def _say_file_error(error: OSError) -> str:
    """Says which file an error of the operating system is about, and what to do."""
    file = error.filename or "this folder"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "make room there, for example with `collapipe jobs prune --keep 5`, or use a folder on another disk"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        remedy = "use a folder and files that this user may read and write"
    else:
        remedy = "check its path and its disk"
    return f"{file} cannot be used ({error.strerror or error}): {remedy}"


@contextmanager
def exit_codes(as_json: bool) -> Iterator[None]:
    """Turns errors of CollaPipe and of files, and Ctrl-C, into a message and an exit code. Other exceptions are bugs and pass."""
    try:
        yield
    except BrokenPipeError:
        raise  # Nobody reads on, and Typer ends the command quietly.
    except (CollapipeError, OSError) as error:
        code = BAD_INPUT if isinstance(error, InvalidInputError | NotFoundError) else FAILED
        message = _say_file_error(error) if isinstance(error, OSError) else str(error)
        if as_json:
            print_json({"event": "error", "message": message, "exit_code": code})
        else:
            complain(f"error: {indented(message)}")
        raise typer.Exit(code) from error
    except KeyboardInterrupt as error:
        if as_json:
            print_json({"event": "error", "message": "interrupted", "exit_code": INTERRUPTED})
        raise typer.Exit(INTERRUPTED) from error


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise `KeyboardInterrupt`, so that the command ends as after Ctrl-C."""

    def interrupt(signal_number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signals = (signal.SIGTERM, signal.SIGHUP)
    former = [signal.signal(number, interrupt) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, former, strict=True):
            signal.signal(number, handler)
