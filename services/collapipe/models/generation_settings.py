"""The settings with which a model generates, as `generation_config.json` of a pretrained directory and of an export has them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from collapipe.errors import InvalidInputError
from collapipe.pretrained_directories import read_json

_ABOUT_THE_FILE = {"_from_model_config", "transformers_version"}
_ONLY_WITH_SAMPLING = {
    *("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p"),
    *("epsilon_cutoff", "eta_cutoff"),
}
_ONLY_WITH_BEAMS = {
    *("early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty"),
    *("constraints", "force_words_ids"),
}
_OF_A_TRANSLATOR = {"do_sample", "num_beams", "num_return_sequences", "max_length"}
"""What a job decides by itself: a translator generates greedily, and `task.max_new_tokens` is its limit."""


def read_generation_settings(directory: Path) -> dict[str, Any]:
    """Reads the settings of a pretrained directory. An older one has them in its `config.json`.

    Raises:
        InvalidInputError: The file is damaged.
    """
    from transformers import GenerationConfig

    path = directory / "generation_config.json"
    has_file = path.is_file()
    if not has_file:
        path = directory / "config.json"
    try:
        settings = read_json(path)
        if not has_file:
            untyped: Any = settings
            settings = GenerationConfig.from_model_config(untyped).to_diff_dict()
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidInputError(
            f"{path}: its settings cannot be used: {error}; copy it again, or remove it"
        ) from error
    return {
        key: value
        for key, value in settings.items()
        if key not in _ABOUT_THE_FILE and value is not None
    }


def settings_after_training(
    given: Mapping[str, Any], end_id: int | None, pad_id: int | None, *, translates: bool
) -> dict[str, Any]:
    """Returns the settings of the trained model, given those of the pretrained one.

    The token that was trained as the end comes first. If the pretrained model has several ends, the others stay.

    Args:
        end_id: The token that ends each text of the training. `None` if there is none.
        pad_id: The token that pads texts. `None` if there is none.
        translates: Whether the task is translation.
    """
    ends = given.get("eos_token_id")
    others = [each for each in ends if each != end_id] if isinstance(ends, list) else []
    settings = {
        **given,
        "eos_token_id": [end_id, *others] if others else end_id,
        "pad_token_id": pad_id,
    }
    if "forced_eos_token_id" in settings:
        settings["forced_eos_token_id"] = end_id
    unused = set(_OF_A_TRANSLATOR) if translates else set()
    if translates or not given.get("do_sample"):
        unused |= _ONLY_WITH_SAMPLING
    if translates or given.get("num_beams", 1) == 1:
        unused |= _ONLY_WITH_BEAMS
    return {key: value for key, value in settings.items() if key not in unused}
