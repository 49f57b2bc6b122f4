"""The base of the tasks of language models, whose answers continue a text."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from collapipe.data.rows import Row
from collapipe.tasks.task import Example, Task

E = TypeVar("E", bound=Example)


class LanguageTask(Task[E]):
    """A task without labels, although rows may have classes by which they are divided among clusters."""

    cuts_texts = False
    generates = True
    continues_text = True

    @property
    def labels(self) -> list[str]:
        return []

    @property
    def held_out_labels(self) -> dict[str, str]:
        return {}

    def answer_stream(self, question: E) -> Callable[[int], str]:
        return self._vocabulary.stream(question.input_ids.tolist())

    def _check_labels(self, rows: Sequence[Row], label_ids: dict[str, int]) -> None:
        return
