"""Runs the programs that configure a network interface."""

import subprocess
from collections.abc import Sequence

from collapipe.errors import InvalidInputError

_TIMEOUT_SECONDS = 5.0


def run_command(line: Sequence[str], remedy: str, standard_input: str | None = None) -> str:
    """Runs a program and returns its output.

    Args:
        remedy: What the program needs, for the error message.

    Raises:
        InvalidInputError: The program did not start, did not end in time, or failed.
    """
    try:
        done = subprocess.run(
            line,
            input=standard_input,
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidInputError(f"`{' '.join(line)}` did not run ({error}): {remedy}") from None
    if done.returncode:
        reason = done.stderr.strip() or f"exit code {done.returncode}"
        raise InvalidInputError(f"`{' '.join(line)}` failed ({reason}): {remedy}")
    return done.stdout
