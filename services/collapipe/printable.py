"""Makes text of other machines and files harmless where people read it: in terminals, logs, reports and the page."""

import re

_OBEYED = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)  # Control characters, line breaks, overrides of the direction of writing, and halves of characters.


def printable(text: str, keep: str = "") -> str:
    r"""Escapes what a terminal would obey, and what would begin a new line: an escape character becomes `\x1b`.

    Args:
        keep: Characters that stay as they are, such as a line break.
    """
    return _OBEYED.sub(
        lambda found: found[0] if found[0] in keep else found[0].encode("unicode_escape").decode(),
        text,
    )


def indented(text: str) -> str:
    """Returns printable text whose lines after the first one are indented, so that none looks like a line of its own."""
    return printable(text, keep="\n").replace("\n", "\n    ")
