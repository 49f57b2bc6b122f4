"""What a model is made of: units that hosts hold, in pipeline order.

Unit 0 is the embedding, units 1 to L are the blocks, unit L + 1 is the head. One floating-point
tensor, the activation, flows from unit to unit and carries the gradient back. What else a unit
needs (attention mask, labels) travels beside it unchanged, as *side* tensors.

`state_dict()` and `load_state_dict()` of a unit carry exactly its state: the trainable parameters
and the persistent buffers, tied tensors once, under the names that they have in the whole model.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor, nn

Side = Mapping[str, Tensor]


class Unit(nn.Module, ABC):
    """The embedding or a block."""

    @abstractmethod
    def forward(self, activation: Tensor | None, side: Side) -> Tensor:
        """Runs the unit.

        Args:
            activation: Output of the unit before, [batch, length, hidden]; `None` for the
                embedding.
            side: Tensors beside the activation.

        Returns:
            The activation for the next unit, [batch, length, hidden].
        """


class Head(nn.Module, ABC):
    """The last unit."""

    @abstractmethod
    def loss_sum(self, activation: Tensor, side: Side, label_smoothing: float) -> Tensor:
        """Sums the loss over the valid targets of a micro-batch: a scalar, not yet divided."""

    @abstractmethod
    def predict(self, activation: Tensor, side: Side) -> Tensor:
        """Predicts for a micro-batch; the caller puts the head into evaluation mode first.

        Returns:
            Label ids [batch] or [batch, length], or token ids [batch, length]; int64.
        """
