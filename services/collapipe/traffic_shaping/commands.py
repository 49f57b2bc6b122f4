"""Runs the programs that change a network interface."""

import subprocess
from collections.abc import Sequence

from collapipe.errors import InvalidInputError

_DEADLINE_SECONDS = 5.0


def run_command(line: Sequence[str], needs: str, given: str | None = None) -> str:
    """Runs a program; returns what it printed.

    Args:
        line: The program and its arguments.
        needs: What it takes to succeed, and what to do without, for the error.
        given: What it reads from its standard input.

    Raises:
        InvalidInputError: It did not start, did not end in time, or failed.
    """
    try:
        done = subprocess.run(
            line,
            input=given,
            capture_output=True,
            text=True,
            check=False,
            timeout=_DEADLINE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidInputError(f"`{' '.join(line)}` did not run ({error}): {needs}") from None
    if done.returncode:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise InvalidInputError(f"`{' '.join(line)}` failed ({said}): {needs}")
    return done.stdout
