"""How a head chooses the tokens that it generates."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from collapipe.errors import InvalidInputError

EmitToken = Callable[[int], None]
"""Takes the next token of an answer. It raises the error that ends the generation."""

_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 0.01, 1e6


@dataclass(frozen=True)
class GenerationSettings:
    """The settings of a generation."""

    max_new_tokens: int
    """Most tokens of an answer. Only a head that generates a whole answer at once uses it."""
    temperature: float = 0.0
    """0 always chooses the most probable token. Otherwise the scores are divided by it before a token is drawn."""
    top_k: int = 0
    """Tokens to draw from: the most probable ones. 0 means all."""
    seed: int = 0
    """Seed of the draws of each sequence."""

    def __post_init__(self) -> None:
        # A smaller number would make scores infinite.
        if self.temperature and not _LEAST_TEMPERATURE <= self.temperature <= _MOST_TEMPERATURE:
            raise InvalidInputError(
                f"the temperature is {self.temperature:g}: give 0, or a number from {_LEAST_TEMPERATURE} to "
                f"{_MOST_TEMPERATURE:g}, for example 0.7"
            )


class TokenChooser:
    """Chooses the tokens of one sequence.

    With the same seed, it draws the tokens that `generate` of `transformers` draws for one row.
    """

    def __init__(self, settings: GenerationSettings) -> None:
        self.settings = settings
        self._generator = torch.Generator().manual_seed(settings.seed)

    def choose(self, logits: Tensor) -> int:
        """Chooses a token, given the logits of the whole vocabulary, [1, vocabulary size]."""
        settings = self.settings
        if not settings.temperature:
            return int(logits.argmax(dim=-1))
        # The import is slow, and only a head that draws tokens needs it.
        from transformers import TemperatureLogitsWarper, TopKLogitsWarper

        scores = logits.to("cpu", torch.float32)
        # These functions use the scores alone, and not the tokens before.
        none = torch.empty((1, 0), dtype=torch.long)
        scores = TemperatureLogitsWarper(settings.temperature)(none, scores)
        if settings.top_k:
            scores = TopKLogitsWarper(settings.top_k)(none, scores)
        probabilities = scores.softmax(dim=-1)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))
