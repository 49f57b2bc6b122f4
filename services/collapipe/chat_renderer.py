"""Renders chats with the chat template of a pretrained directory, in a process of its own.

A template is a program of whoever made the directory. The sandbox of jinja2 keeps it from the internals of Python, but lets it loop
and fill the memory. So `python -m collapipe.chat_renderer` renders, within limits, and the kernel ends it if it needs more.

Its first line of input is {"template", "roles", "seconds", "most_characters"}, and each other one
a list of {"messages", "add_generation_prompt"}. It answers with one line each: {"texts"} or {"error"}. It ends with its input, or
when nothing was asked for a while.
"""

import json
import resource
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from collapipe.errors import InvalidInputError

_MEMORY_BYTES = 1 << 30
"""Address space of the process. Its code takes about a fifth of it."""
_SECONDS_EACH = 0.1
"""Processor time that is added for each chat."""
_MAX_REASON = 500
"""Most characters of an error of a template."""
_IDLE_SECONDS = 60.0
"""After this time without a question, the process ends. The next question starts another one, which takes seconds."""


class ChatRenderer:
    """Starts the process with the first chat. Many threads may use it.

    Args:
        roles: The special tokens that the template may name, by role.
        most_characters: Longest rendered text.
        seconds: Processor time for all chats together, beside that for each chat.
    """

    def __init__(
        self,
        template: str,
        roles: Mapping[str, str],
        most_characters: int,
        seconds: float = 10.0,
    ) -> None:
        opening = {"template": template, "roles": dict(roles), "seconds": seconds}
        self._opening = _line({**opening, "most_characters": most_characters})
        self._seconds = seconds
        self._asking = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end_process: Callable[[], object] = lambda: None

    def render(self, chats: Sequence[tuple[Sequence[Mapping[str, Any]], bool]]) -> list[str]:
        """Renders chats, each with or without the generation prompt behind it.

        Raises:
            InvalidInputError: The template refuses them, or needs more time, memory or text than it may.
        """
        question = _line(
            [
                {"messages": list(messages), "add_generation_prompt": is_prompt}
                for messages, is_prompt in chats
            ]
        )
        with self._asking:
            answer, code = self._ask(question)
            if not answer and code == 0:  # It was ending because nothing was asked.
                answer, code = self._ask(question)
        if not answer:
            reason = f"its process ended with code {code}"
            if code == -signal.SIGPROF:
                reason = (
                    f"it took more than {self._seconds:g} s, and {_SECONDS_EACH:g} s for each chat"
                )
            raise InvalidInputError(f"{reason}: use a simpler template")
        document = json.loads(answer)
        if "error" in document:
            raise InvalidInputError(document["error"])
        texts: list[str] = document["texts"]
        return texts

    def _ask(self, question: bytes) -> tuple[bytes, int]:
        """Returns the answer. If there is none, returns b"" and the exit code of the process."""
        process = self._process
        if process is None or process.poll() is not None:
            self._end_process()  # Closes the pipes of the one before.
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", "collapipe.chat_renderer"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                # Python looks for modules in the directory of a process first, which may be one of data.
                cwd=Path(__file__).parents[1],
            )
            self._end_process = weakref.finalize(self, _end, process)
            question = self._opening + question
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(question)
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer.endswith(b"\n"):
            return b"", process.wait()
        return answer, 0


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _line(document: Any) -> bytes:
    return json.dumps(document).encode() + b"\n"


def main() -> None:
    """Answers until the input ends."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    opening = json.loads(sys.stdin.buffer.readline())
    make: Any = PreTrainedTokenizerFast
    # It renders chats like the tokenizer of the model, but needs no tokens.
    renderer = make(
        tokenizer_object=Tokenizer(models.BPE()),
        chat_template=opening["template"],
        **opening["roles"],
    )
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    seconds = opening["seconds"]
    # The first question comes with the opening. Later ones come one by one, so none is in the buffer while `select` waits.
    line = sys.stdin.buffer.readline()
    while line:
        chats = json.loads(line)
        seconds += _SECONDS_EACH * len(chats)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = _line(_answer(renderer, chats, opening["most_characters"]))
        seconds, _ = signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()
        is_asked = select.select([0], [], [], _IDLE_SECONDS)[0]
        line = sys.stdin.buffer.readline() if is_asked else b""


def _answer(
    renderer: Any, chats: Sequence[Mapping[str, Any]], most_characters: int
) -> dict[str, Any]:
    try:
        texts = [
            renderer.apply_chat_template(
                chat["messages"],
                tokenize=False,
                add_generation_prompt=chat["add_generation_prompt"],
            )
            for chat in chats
        ]
    except Exception as error:  # A template may raise whatever Python can raise.
        reason = str(error) or type(error).__name__
        return {"error": reason[:_MAX_REASON]}
    longest = max(map(len, texts))
    if longest > most_characters:
        return {
            "error": f"it made a text of {longest} characters, but at most {most_characters} are allowed: shorten the chat or the template"
        }
    return {"texts": texts}


if __name__ == "__main__":
    main()
