"""The units of a model, which hosts hold in pipeline order.

Unit 0 is the embedding, units 1 to L are the blocks, unit L + 1 is the head. Each unit passes one
floating-point tensor, the activation, to the next unit. The attention mask, a side tensor, travels with it and does not
change. The labels are a side tensor of the head only.

The state of a unit consists of its trainable parameters and its persistent buffers. `state_dict` and
`load_state_dict` use the names that they have in the whole model, and contain a tied tensor once.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor, nn

from collapipe.errors import InvalidInputError
from collapipe.models.generation import EmitToken, TokenChooser
from collapipe.models.key_values import KeyValues

Side = Mapping[str, Tensor]
"""The side tensors of a micro-batch, by name."""

IGNORED = -100
"""The label of a position that has no target."""


class Unit(nn.Module, ABC):
    """The embedding or a block."""

    has_attention = False

    @abstractmethod
    def forward(
        self, activation: Tensor | None, side: Side, earlier: KeyValues | None = None
    ) -> Tensor:
        """Returns the activation for the next unit, [batch, length, hidden].

        Args:
            activation: The output of the previous unit. `None` for the embedding.
            earlier: The keys and values of earlier passes over the same rows, to which this pass adds its own. The
                attention mask then covers the tokens of all passes. Only language models use it.
        """


class Head(nn.Module, ABC):
    """The last unit."""

    @abstractmethod
    def loss_sum(self, activation: Tensor, side: Side, label_smoothing: float) -> Tensor:
        """Returns the sum of the losses of a micro-batch, as a scalar. Labels of -100 do not count."""

    @abstractmethod
    def predict(self, activation: Tensor, side: Side) -> Tensor:
        """Returns what the task measures: label ids [batch] or [batch, length], or token ids [batch, length].

        They are int64. A language model returns the sum of the losses of each row and its number of right
        tokens, [batch, 2], as float32. The head must be in evaluation mode.
        """

    def generate(
        self, activation: Tensor, side: Side, chooser: TokenChooser, emit: EmitToken
    ) -> None:
        """Generates from the last pass over one row, and calls `emit` for each token.

        A head of a language model generates one token. A head that has a decoder generates the whole answer.
        """
        raise InvalidInputError(
            "this model labels texts, so it generates no tokens: ask it for labels"
        )
