"""The commands that use a trained model: `collapipe predict` and `collapipe evaluate`."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from collapipe.errors import InvalidInputError
from collapipe.finding import shortened
from collapipe.mistakes import say_some
from collapipe.printable import printable
from collapipe.rpc.finding_messages import from_message
from collapipe.v1.model_use_pb2 import AnswerPiece
from collapipe_client.cli_options import AsJson, takes_option_groups
from collapipe_client.endpoint import EndpointOptions, client_for_model
from collapipe_client.jobs_commands import JobArgument
from collapipe_client.message_json import to_document
from collapipe_client.reporting import (
    FAILED,
    complain,
    exit_codes,
    print_json,
    say,
    termination_as_interrupt,
)
from collapipe_client.view_state import definition_lines, say_evaluation, say_one_answer


@takes_option_groups
def predict(
    job: JobArgument,
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            help="Texts to answer, as they are. For instruction, a JSON list of messages is a chat. Without TEXTS, each line of "
            "standard input is a text."
        ),
    ] = None,
    *,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Answer the rows of a file of this machine: .jsonl, .csv, .tsv, .parquet, .conll, or .txt with a text a line. A row that "
            "cannot be answered is named, and the exit code is then 1.",
        ),
    ] = None,
    column: Annotated[
        str, typer.Option(help="Column of the texts in --data. Labels are not needed.")
    ] = "text",
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most tokens of a generated answer. Default: task.max_new_tokens of the job.",
        ),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="0 always takes the most probable token. Otherwise tokens are drawn, from scores divided by it.",
        ),
    ] = 0.0,
    top_k: Annotated[
        int, typer.Option(min=0, help="Draw from so many of the most probable tokens. 0 means all.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = 0,
    endpoint_options: EndpointOptions,
    as_json: AsJson = False,
) -> None:
    """Answer texts with the model of a job's last commit, on the hosts of its cluster 0.

    If no testbed runs, this command starts one on this machine and ends it afterwards.
    """
    with exit_codes(as_json), termination_as_interrupt():
        if texts and data:
            raise InvalidInputError("texts and --data were given: leave one of them out")
        if data:
            # The import takes time, and a client need not have the packages that read data.
            from collapipe.data.texts import read_texts

            given, findings = read_texts(data, column)
            for finding in findings:
                complain(finding)
        else:
            given = texts or [line.removesuffix("\n") for line in sys.stdin]
        empty = [row for row, text in enumerate(given, start=1) if not text.strip()]
        if len(empty) == len(given):
            raise InvalidInputError(
                f'no text was given: collapipe predict {job} "a text", or lines on standard input'
            )
        with client_for_model(endpoint_options, job) as client:
            pieces = client.predict(
                job,
                given,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                seed=seed,
                skip_refused=data is not None,
                waiting=_teller(as_json),
            )
            if empty:
                complain(
                    f"{len(empty)} of {len(given)} rows are empty, and have empty answers: row {_numbers(empty)}"
                )
            refused: list[int] = []
            wordless: list[int] = []
            pieces = _judged(pieces, refused, wordless)
            if as_json:
                _print_documents(given, pieces)
            else:
                _print_answers(pieces)
        if unsaid := sorted({*wordless} - {*empty} - {*refused}):
            complain(
                f"the model answered {len(unsaid)} of {len(given)} rows with nothing, or with blanks: row {_numbers(unsaid)}"
            )
        if refused:
            complain(f"{len(refused)} of {len(given)} rows have no answer, as named above")
            raise typer.Exit(FAILED)


@takes_option_groups
def evaluate(
    job: JobArgument,
    data: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="File of rows, as for data.held_out of a job. It stays on this machine.",
        ),
    ],
    *,
    endpoint_options: EndpointOptions,
    as_json: AsJson = False,
) -> None:
    """Measure the model of a job's last commit on the rows of a file.

    If no testbed runs, this command starts one on this machine and ends it afterwards.
    """
    with exit_codes(as_json), termination_as_interrupt():
        with client_for_model(endpoint_options, job) as client:
            whole = Path(data)  # A comma may be a part of its name.
            files = [whole] if whole.is_file() else [Path(part.strip()) for part in data.split(",")]
            evaluation = client.evaluate(job, *files, waiting=_teller(as_json))
        if as_json:
            print_json({"event": "evaluation", **to_document(evaluation)})
        else:
            findings = [from_message(each) for each in evaluation.findings]
            for finding in shortened(findings, "--json prints all"):
                complain(str(finding))
            if warning := say_one_answer(evaluation):
                complain(f"warning: {warning}")
            say("\n".join([say_evaluation(evaluation), *definition_lines(evaluation)]))


def _teller(as_json: bool) -> Callable[[str], None]:
    """Returns a function that tells what a command waits for, whenever that changes."""
    last = ""

    def tell(reason: str) -> None:
        nonlocal last
        if reason and reason != last:
            if as_json:
                print_json({"event": "waiting", "for": reason})
            else:
                complain(f"waiting for {reason}")
        last = reason

    return tell


def _numbers(rows: list[int]) -> str:
    return say_some([str(row) for row in rows])


def _judged(
    pieces: Iterator[AnswerPiece], refused: list[int], wordless: list[int]
) -> Iterator[AnswerPiece]:
    """Yields all pieces. Names each row that cannot be answered, and adds its number to `refused`.

    The numbers of all rows whose answer has no words are added to `wordless`.
    """
    has_words: set[int] = set()
    for piece in pieces:
        row = piece.text_index + 1
        if piece.refusal:
            refused.append(row)
            complain(f"row {row} has an empty answer: {piece.refusal}")
        if piece.text.strip():
            has_words.add(row)
        if piece.is_last and row not in has_words:
            wordless.append(row)
        yield piece


def _print_answers(pieces: Iterator[AnswerPiece]) -> None:
    """Prints the answers in the order of the texts. The next one is printed while it is generated.

    A file gets them as they are. A terminal obeys nothing in them.
    """
    shows_words = sys.stdout.isatty()
    kept: dict[int, list[AnswerPiece]] = {}
    current = 0
    for piece in pieces:
        kept.setdefault(piece.text_index, []).append(piece)
        while current in kept:
            shown = kept.pop(current)
            text = "".join(each.text for each in shown)
            print(printable(text, keep="\n\t") if shows_words else text, end="", flush=True)
            if not shown[-1].is_last:
                break
            print(flush=True)
            current += 1


def _print_documents(texts: list[str], pieces: Iterator[AnswerPiece]) -> None:
    """Prints a document for each answer when it is complete."""
    answers: dict[int, AnswerPiece] = {}
    for piece in pieces:
        answer = answers.setdefault(piece.text_index, AnswerPiece())
        answer.text += piece.text
        answer.tokens.extend(piece.tokens)
        if piece.is_last:
            print_json(
                {
                    "event": "answer",
                    "row": piece.text_index + 1,
                    "text": texts[piece.text_index],
                    "answer": answer.text,
                    "tokens": list(answer.tokens),
                    "refusal": piece.refusal,
                }
            )
            del answers[piece.text_index]
