"""Splits the state of a whole model into the states of its units, and joins them again.

The tensors of a unit include frozen weights only with LoRA or frozen embeddings. They travel apart from the others.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from torch import Tensor

from collapipe.errors import CorruptDataError
from collapipe.job import LABELLING_TASKS
from collapipe.models.adapter import ModelAdapter
from collapipe.models.lora import is_of_lora, save_adapter
from collapipe.models.quantised_layers import round_to_quantised

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def split_state(adapter: ModelAdapter, model: "PreTrainedModel") -> list[dict[str, Tensor]]:
    """Returns the state of each unit, for the unit's `load_state_dict`. The tensors are those of the model."""
    tensors = model.state_dict()
    return [
        {name: tensors[name] for name in adapter.state_names(unit_index)}
        for unit_index in range(adapter.num_units)
    ]


def divide_state(
    state: Mapping[str, Tensor], frozen_names: Mapping[str, str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the trained tensors of a unit's state, and the frozen ones by their names in a model without LoRA.

    Args:
        frozen_names: What `collapipe.models.lora.frozen_names` returned for the unit.
    """
    own = set(frozen_names.values())
    trained = {name: tensor for name, tensor in state.items() if name not in own}
    return trained, {name: state[own_name] for name, own_name in frozen_names.items()}


def join_model(adapter: ModelAdapter, states: Iterable[dict[str, Tensor]]) -> "PreTrainedModel":
    """Builds a whole model from the states of its units, in evaluation mode and ready for `save_pretrained`.

    LoRA is added to the frozen weights.

    Raises:
        CorruptDataError: A state is not that of the model's unit, or the number of states is wrong.
    """
    model, lora = adapter.build_blank_model()
    for state in _checked(adapter, states):
        try:
            model.load_state_dict(state, strict=False)
        except RuntimeError as error:
            raise CorruptDataError(
                f"the states do not fit the {adapter.family} model: {error}"
            ) from error
    if adapter.quantises_base:
        # What was trained fits the quantised weights, so the merged model has their values.
        round_to_quantised(model.get_submodule(adapter.blocks_path))
    if lora is not None:
        # If this key is true, `peft` sets it to false, because it compares the output layer with the encoder's embedding.
        ties, model.config.tie_word_embeddings = model.config.tie_word_embeddings, False
        model = cast("PreTrainedModel", lora.merge_and_unload())
        model.config.tie_word_embeddings = ties
    model.train(False)
    return adapter.for_export(model)


def save_lora(
    adapter: ModelAdapter, states: Iterable[dict[str, Tensor]], directory: Path, base: str
) -> None:
    """Writes the LoRA adapter of the job, as `peft` does. Keeps the frozen weights of no unit.

    Args:
        base: The directory of the pretrained model.

    Raises:
        CorruptDataError: A state is not that of the model's unit, or the number of states is wrong.
    """
    model, lora = adapter.build_on_meta()
    assert lora is not None
    if adapter.task in LABELLING_TASKS:
        model.config.save_pretrained(directory)  # The pretrained model does not know the labels.
    else:
        model.generation_config.save_pretrained(directory)  # Nor the end token of the job.
    tensors = {
        name: tensor
        for state in _checked(adapter, states)
        for name, tensor in state.items()
        if is_of_lora(name)
    }
    save_adapter(lora, tensors, directory, base, adapter.task)


def _checked(
    adapter: ModelAdapter, states: Iterable[dict[str, Tensor]]
) -> Iterator[dict[str, Tensor]]:
    """Yields the states. Raises the errors of `join_model`."""
    num_states = 0
    for unit_index, state in enumerate(states):
        num_states += 1
        if unit_index >= adapter.num_units or set(state) != set(adapter.state_names(unit_index)):
            raise CorruptDataError(
                f"the state of unit {unit_index} has other tensors than that unit of the "
                f"{adapter.family} model: the states are of another job"
            )
        yield state
    if num_states != adapter.num_units:
        raise CorruptDataError(
            f"{num_states} states were given for the {adapter.num_units} units of the "
            f"{adapter.family} model: each unit needs one"
        )
