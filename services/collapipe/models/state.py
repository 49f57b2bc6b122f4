"""Splits the state of a whole model into the states of its units, and joins them again."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from collapipe.errors import CorruptDataError
from collapipe.models.adapter import ModelAdapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def split_state(adapter: ModelAdapter, model: "PreTrainedModel") -> list[dict[str, Tensor]]:
    """Returns a copy of the state of each unit, for the unit's `load_state_dict`."""
    tensors = model.state_dict()
    return [
        {
            name: tensors[name].to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name in adapter.state_names(unit_index)
        }
        for unit_index in range(adapter.num_units)
    ]


def join_model(adapter: ModelAdapter, states: Iterable[dict[str, Tensor]]) -> "PreTrainedModel":
    """Builds a whole model from the states of its units, in evaluation mode and ready for `save_pretrained`.

    Raises:
        CorruptDataError: A state is not that of the model's unit, or the number of states is wrong.
    """
    model = adapter.build_blank_model()
    tensors: dict[str, Tensor] = {}
    num_states = 0
    for unit_index, state in enumerate(states):
        num_states += 1
        if unit_index >= adapter.num_units or set(state) != set(adapter.state_names(unit_index)):
            raise CorruptDataError(
                f"the state of unit {unit_index} has other tensors than that unit of the "
                f"{adapter.family} model: the states are of another job"
            )
        tensors.update(state)
    if num_states != adapter.num_units:
        raise CorruptDataError(
            f"{num_states} states were given for the {adapter.num_units} units of the "
            f"{adapter.family} model: each unit needs one"
        )
    try:
        model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise CorruptDataError(
            f"the states do not fit the {adapter.family} model: {error}"
        ) from error
    model.train(False)
    return adapter.for_export(model)
