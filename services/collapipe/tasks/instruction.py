"""The task of answering prompts and chats. Its metric is the share of answers that are right as a whole."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from collapipe.data.cluster_rows import NewRows
from collapipe.data.rows import ChatRow, Row, check_keys, parse_json
from collapipe.errors import InvalidInputError
from collapipe.finding import Finding
from collapipe.models import IGNORED
from collapipe.tasks.language_task import LanguageTask
from collapipe.tasks.task import Example, IntArray, padded


@dataclass(frozen=True)
class AnswerExample(Example):
    """An encoded prompt with its answer."""

    num_prompt_tokens: int

    @property
    def num_targets(self) -> int:
        """Number of tokens of the answer, its end token included."""
        return len(self.input_ids) - self.num_prompt_tokens


class InstructionFollowing(LanguageTask[AnswerExample]):
    """The data of a model that answers. Only the tokens of answers count in the loss.

    A row that is longer than `task.max_length` is not cut, because without its whole prompt or its whole answer it would teach
    something else. A training row is left out. A held-out row counts as wrong, but not in the perplexity.
    """

    kind = "instruction"
    metric = "exact_match"
    length_for_more_rows = "raise"
    _lost: Sequence[AnswerExample] = ()
    """The held-out rows of this cluster that are too long."""
    _num_lost_read = 0
    _num_ended = 0
    """Training rows whose prompts end with the end token."""

    @property
    def num_held_out_rows(self) -> int:
        return len(self._held_out) + len(self._lost)

    @property
    def findings(self) -> list[Finding]:
        if not self._num_ended:
            return super().findings
        found = Finding(
            "warning",
            self._rows.name,
            f"{self._num_ended} of {len(self._train)} prompts end with the end token {self._vocabulary.end_token!r}, so the model learns "
            "to answer behind it",
            "use a chat template with a generation prompt, or remove the token from the rows",
        )
        return [*super().findings, found]

    def question(self, text: str) -> AnswerExample:
        """Encodes a prompt, or a chat before its answer: a JSON list of messages, as in the rows."""
        messages = _messages(text)
        if messages is not None:
            # The template renders an answer only after its other messages, and an empty one tells nothing.
            text, _ = self._vocabulary.render(
                [*messages, {"role": "assistant", "content": ""}], "the text"
            )
        ids = self._vocabulary.encode_prompt(text, add_start=messages is None)
        array = np.array(ids, dtype=np.int32)
        return AnswerExample(Row("the text", 1, (text,), ()), array, len(ids))

    def _take(self, new: NewRows) -> None:
        train, long = self._encode(new.train)
        held_out, long_held_out = self._encode(new.held_out)
        for what, num_fitting, num_long in (
            ("training", len(train) + len(self._train), len(long)),
            ("held-out", len(held_out) + self._num_held_out_read, len(long_held_out)),
        ):
            if num_long and not num_fitting:
                raise InvalidInputError(
                    f"{self._rows.name}: each of the {num_long} {what} rows has more than task.max_length = "
                    f"{self._vocabulary.max_length} tokens in its prompt and its answer: raise task.max_length"
                )
        self._accept(new, train, held_out)
        self.num_long_rows += len(long)
        end_id = self._vocabulary.end_id
        self._num_ended += sum(
            each.input_ids[each.num_prompt_tokens - 1] == end_id for each in train
        )
        lost = self._rows.share_held_out(long_held_out, self._num_lost_read)
        self._lost = [*self._lost, *lost]
        self.num_long_held_out_rows = len(self._lost)
        self._num_lost_read += len(long_held_out)

    def _encode(self, rows: Sequence[Row]) -> tuple[list[AnswerExample], list[AnswerExample]]:
        """Encodes rows in their order. Returns also those that are too long."""
        fitting: list[AnswerExample] = []
        long: list[AnswerExample] = []
        for is_chat, group in groupby(rows, key=lambda row: isinstance(row, ChatRow)):
            members = list(group)
            texts = [self._texts(row) for row in members]
            prompts, answers = ([text[part] for text in texts] for part in (0, 1))
            # A chat template writes special tokens by itself.
            encoded = self._vocabulary.encode_answers(prompts, answers, add_start=not is_chat)
            for row, (prompt, answer) in zip(members, encoded, strict=True):
                if not prompt:
                    raise InvalidInputError(
                        f"{row.place}: the {'messages before the answer have' if is_chat else 'prompt has'} no token, so the "
                        "model has nothing from which it could predict the answer: write a longer prompt, or use a template or a tokenizer "
                        "with a start token"
                    )
                ids = np.array([*prompt, *answer], dtype=np.int32)
                is_long = len(ids) > self._vocabulary.max_length
                (long if is_long else fitting).append(AnswerExample(row, ids, len(prompt)))
        return fitting, long

    def _texts(self, row: Row) -> tuple[str, str]:
        """Returns the prompt and the answer. What a chat template writes behind the end token is no part of the answer."""
        if isinstance(row, ChatRow):
            prompt, answer = self._vocabulary.render(row.messages, row.place)
            return prompt, answer.rstrip() + self._kept_blanks(row, answer)
        prompt, answer = row.texts
        return prompt, answer

    def _kept_blanks(self, row: ChatRow, rendered: str) -> str:
        """Returns those blanks at the end of a rendered answer that are not of the template."""
        *before, last = row.messages
        content = last["content"].rstrip()
        if content == last["content"]:
            return ""
        _, trimmed = self._vocabulary.render([*before, {**last, "content": content}], row.place)
        end = len(rendered.rstrip())
        of_template = trimmed[len(trimmed.rstrip()) :]
        is_alike = rendered[:end] == trimmed.rstrip() and rendered[end:].endswith(of_template)
        return rendered[end : len(rendered) - len(of_template)] if is_alike else ""

    def _plain_texts(self, row: Row) -> Sequence[str]:
        """Returns the messages of a chat. Of other rows, returns the answer without its end token.

        That token may be there on purpose, and so may those of a prompt that was rendered before.
        """
        if isinstance(row, ChatRow):
            return [message["content"] for message in row.messages]
        return [row.texts[-1].removesuffix(self._vocabulary.end_token)]

    def _labels(self, examples: Sequence[AnswerExample], length: int) -> IntArray:
        return padded([_next_tokens(example) for example in examples], IGNORED)

    def _count(
        self, examples: Sequence[AnswerExample], predictions: Sequence[Sequence[float]]
    ) -> dict[str, float]:
        """Counts right answers and right tokens, and adds losses.

        An answer is right if each of its tokens, and its end token, is the most probable one after the right tokens before
        it. This is so exactly if greedy decoding gives the answer, so nothing needs to be generated.
        """
        num_targets = sum(example.num_targets for example in examples)
        return {
            "right": sum(
                right == example.num_targets
                for example, (_, right) in zip(examples, predictions, strict=True)
            ),
            "loss": math.fsum(loss for loss, _ in predictions),
            "right_tokens": sum(right for _, right in predictions),
            "measured_tokens": num_targets,
            "tokens": num_targets + sum(example.num_targets for example in self._lost),
        }


def _messages(text: str) -> list[dict[str, str]] | None:
    """Returns the messages of a chat. `None` for any other text. Raises `InvalidInputError` if a message has a key twice."""
    try:
        messages: Any = parse_json(text)
    except ValueError:
        return None
    is_chat = isinstance(messages, list) and all(
        isinstance(message, dict)
        and all(isinstance(message.get(key), str) for key in ("role", "content"))
        for message in messages
    )
    if not is_chat or not messages:
        return None
    chat: list[dict[str, str]] = messages
    for message in chat:
        check_keys(message, ("role", "content"), "the text")
    return chat


def _next_tokens(example: AnswerExample) -> list[int]:
    """Returns the label of each position: the token that follows, if it belongs to the answer."""
    num_ignored = example.num_prompt_tokens - 1
    answer = example.input_ids[example.num_prompt_tokens :]
    return [*[IGNORED] * num_ignored, *answer.tolist(), IGNORED]
