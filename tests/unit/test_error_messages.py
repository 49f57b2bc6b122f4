"""Reads every error that the code raises. A message for people must name a remedy or a limit.

A message between programs must name a value or a remedy.

Other tests do not repeat the sentences: they check the type, the setting or the host, and the value.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
FOR_PEOPLE = (
    *("InvalidInputError", "NotFoundError", "NotPermittedError", "InfeasibleError"),
    "ValueError",
)
"""Errors that a person can mend. The others are between programs, which try again by themselves. Checks of the settings of a
document raise `ValueError`."""
BETWEEN_PROGRAMS = (
    *("WrongStateError", "PeerLostError", "PeerFaultyError", "AttemptFailedError"),
    *("CorruptDataError", "DivergedError"),
)
VERBS = (
    "add|allow|ask|begin|call|change|check|choose|copy|correct|create|delete|edit|end|export|"
    "fit|free|give|install|issue|join|leave|list|look|lower|make|mend|move|name|open|pass|put|"
    "raise|read|register|remove|renew|repeat|replace|restart|restore|run|say|see|send|set|"
    "shorten|split|start|store|submit|take|train|try|update|upgrade|use|wait|write"
)
"""What a message may ask for."""
REMEDY = re.compile(
    rf"\b({VERBS})\b|must |did you mean|one of|at (most|least)|only |needs? |for example"
    r"|instead of|begins? with|from \S+ (to|on)|between|pip install|`collapipe |lists? |<remedy>",
    re.IGNORECASE,
)
"""A remedy, or the limit that the value must keep."""
FRAGMENTS = {
    "box_folder.py": ("it is for another identity",),
    "data_files.py": ("<value>: <value>",),
    "host.py": ("--data-root: <value>",),
    "host_resources.py": (
        "blob <value> is not held by",
        "<value> has no directory",
        "<value> has other weights",
    ),
    "model_commands.py": ("no text was given",),
    "model_use.py": ("<value> of <value> texts cannot be answered",),
    "pki.py": (
        *(
            "not a PEM file",
            "not certificates in PEM",
            "not a certificate",
            "not a signing request",
            "the certificate does not",
        ),
        *("it is signed with", "its issuing authority is of", "the signing request is signed"),
    ),
    "resident_units.py": (
        *("blob <value> is not held here", "no file of them was named"),
        *("<value> has other tensors", "<value> has shape"),
    ),
    "quantised_layers.py": ("a weight of <value> has shape",),
    "scenario.py": ("sweep.values has <value>",),
    "tensor_blob.py": ("the header has <value> bytes", "tensor <value> has other bytes"),
    "tokens.py": ("<value> is no identity", "wrong checksum"),
    "blob_store.py": ("blob <value> is not stored here",),
    "grants.py": ("the plan of <value> has no unit", "<value> was asked to run stage"),
    "service_process.py": ("--config <value>: <value>",),
    "adapter.py": ("unit <value> does not exist",),
    "box_options.py": ("<value>; or a network profile", "<value>: <value>: <value>"),
    "cluster_rows.py": ("<value>: cluster <value> has",),
    "convergence_fit.py": ("<value> runs that differ in nothing",),
    "link_probe.py": ("the burst of a probe",),
    "servicer.py": ("a session that has begun takes no command",),
    "session.py": ("stage <value> is to run units",),
    "testbed_options.py": ("--device-memory: <value>",),
    "transfer.py": ("offset <value> is beyond",),
}
"""Beginnings of messages to which a caller adds the rest, and of those that only another program gets."""


class Raised(NamedTuple):
    """A message in the code, with "<value>" for what is put into it, and "<remedy>" for a shared remedy."""

    file: Path
    line: int
    error: str
    message: str

    @property
    def is_passed_on(self) -> bool:
        """Whether the whole message, or its end, comes from elsewhere."""
        return self.message in ("", "<value>", "<remedy>")


def raised() -> Iterator[Raised]:
    for folder in ("services/collapipe", "clients"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if not isinstance(node, ast.Call) or not node.args:
                    continue
                name = ast.unparse(node.func).rpartition(".")[2]
                if name in (*FOR_PEOPLE, *BETWEEN_PROGRAMS):
                    # The first argument of errors about peers is the host.
                    position = 1 if name.startswith("Peer") else 0
                    message = words_of(node.args[position])
                    yield Raised(path.relative_to(ROOT), node.lineno, name, message)


def words_of(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(words_of, parts))
        case ast.BinOp(left=left, right=right):
            return words_of(left) + words_of(right)
        case ast.FormattedValue(value=value):
            return words_of(value)
    name = ast.unparse(node)
    is_remedy = re.search(
        r"remedy|_JOIN_AGAIN|_PACKAGE|_some\(|_HOW_TO|hint|_INSTALL|_BASE|suggest", name, re.I
    )
    return "<remedy>" if is_remedy else "<value>"


ALL = list(raised())


def id_of(one: Raised) -> str:
    return f"{one.file.name}:{one.line}"


@pytest.mark.parametrize("error", FOR_PEOPLE)
def test_error_for_people_says_what_to_do(error: str) -> None:
    without = [
        f"{one.file}:{one.line}: {one.message}"
        for one in ALL
        if one.error == error and not one.is_passed_on
        if not REMEDY.search(one.message)
        if not one.message.startswith(FRAGMENTS.get(one.file.name, ("\0",)))
    ]
    assert without == [], "each message needs a limit or a remedy: `...: use at most 8`"


@pytest.mark.parametrize("error", BETWEEN_PROGRAMS)
def test_error_between_programs_names_a_value_or_a_remedy(error: str) -> None:
    without = [
        f"{one.file}:{one.line}: {one.message}"
        for one in ALL
        if one.error == error and not one.is_passed_on
        if "<" not in one.message and not REMEDY.search(one.message)
    ]
    assert without == [], "each message needs a value or a remedy"


def test_every_kind_of_error_is_read() -> None:
    assert {one.error for one in ALL} >= {*FOR_PEOPLE, *BETWEEN_PROGRAMS}
