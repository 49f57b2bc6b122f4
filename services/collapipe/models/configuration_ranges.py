"""Says which settings of a model's configuration are read, and which values each of them may have.

`transformers` checks types, but hardly any value: no layers, a million layers and heads without a size end as errors deep inside of it,
or keep a service busy for hours. No real model is near these limits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from collapipe.errors import InvalidInputError
from collapipe.job import MOST_TOKENS

MOST_PARAMETERS = 100_000_000_000
"""Largest number of parameters of a model. The edge server builds the whole model on its disk."""
_MOST_TABLE_NUMBERS = 1 << 22
"""Most positions times width of a table of sinusoidal positions. `transformers` computes its numbers one by one, about a million in a second,
and no other job can make a model meanwhile. Real models have up to 512 x 1,024."""


@dataclass(frozen=True)
class _Range:
    """The values from `least` to `most`."""

    least: float
    most: float
    is_whole: bool = True

    def __str__(self) -> str:
        return f"a {'whole ' if self.is_whole else ''}number from {self.least:g} to {self.most:g}"

    def __contains__(self, value: object) -> bool:
        kinds = int if self.is_whole else (int, float)
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        return is_number and self.least <= value <= self.most  # type: ignore[operator]  # NaN is in no range.


_WIDTH = _Range(1, 65_536)
_INNER_WIDTH = _Range(1, 1_048_576)
_LAYERS = _Range(1, 256)
_HEADS = _Range(1, 1024)
_POSITIONS = _Range(1, 2_097_152)
_DROPOUT = _Range(0, 0.999, is_whole=False)
_EPSILON = _Range(1e-30, 1, is_whole=False)
_SPREAD = _Range(0, 100, is_whole=False)
_FACTOR = _Range(1e-6, 1e6, is_whole=False)

_RANGES: Mapping[str, _Range] = {
    **dict.fromkeys(("hidden_size", "dim", "d_model", "n_embd"), _WIDTH),
    **dict.fromkeys(
        ("intermediate_size", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner"),
        _INNER_WIDTH,
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layers", "n_layer", "encoder_layers", "decoder_layers"), _LAYERS
    ),
    "max_window_layers": _Range(0, 256),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "num_key_value_heads",
            "n_heads",
            "n_head",
            "encoder_attention_heads",
            "decoder_attention_heads",
        ),
        _HEADS,
    ),
    "head_dim": _WIDTH,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "sliding_window"), _POSITIONS),
    "type_vocab_size": _WIDTH,
    **dict.fromkeys(
        (
            "hidden_dropout_prob",
            "attention_probs_dropout_prob",
            "classifier_dropout",
            "dropout",
            "attention_dropout",
            "activation_dropout",
            "seq_classif_dropout",
            "decoder_layerdrop",
            "resid_pdrop",
            "embd_pdrop",
            "attn_pdrop",
        ),
        _DROPOUT,
    ),
    **dict.fromkeys(("layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps"), _EPSILON),
    **dict.fromkeys(("initializer_range", "init_std"), _SPREAD),
}
ROTARY_RANGES: Mapping[str, _Range] = {
    "rope_theta": _Range(1, 1e12, is_whole=False),
    "original_max_position_embeddings": _POSITIONS,
    "partial_rotary_factor": _Range(1e-3, 1, is_whole=False),
    **dict.fromkeys(
        (
            "factor",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "low_freq_factor",
            "high_freq_factor",
            "short_factor",
            "long_factor",
        ),
        _FACTOR,
    ),
}
"""The numbers, and lists of numbers, of the setting `rope_parameters`."""
READ_SETTINGS = frozenset(_RANGES) | {
    "hidden_act",
    "activation",
    "activation_function",
    "attention_bias",
    "layer_types",
    "mlp_bias",
    "rope_parameters",
    "scale_attn_by_inverse_layer_idx",
    "scale_attn_weights",
    "scale_embedding",
    "sinusoidal_pos_embds",
    "use_sliding_window",
}
"""All settings that some family reads. Those without a range have few values, which `transformers` checks."""


def check_ranges(values: Mapping[str, Any]) -> None:
    """Refuses values that no model can have, before anything is made from them.

    Args:
        values: A configuration. Settings that are missing or `None` have defaults.

    Raises:
        InvalidInputError: A value is outside of its range.
    """
    for key, allowed in _RANGES.items():
        _check(key, values.get(key), allowed)
    for key in ("vocab_size", "decoder_vocab_size"):
        _check(key, values.get(key), _Range(1, MOST_TOKENS))
    rotary = [values.get(key) for key in ("rope_parameters", "rope_scaling")]
    for numbers in (values, *(each for each in rotary if isinstance(each, dict))):
        for key, allowed in ROTARY_RANGES.items():
            value = numbers.get(key)
            for each in value if isinstance(value, list) else [value]:
                _check(key, each, allowed)


def check_position_table(config: Any) -> None:
    """Refuses a table of sinusoidal positions that takes long to compute; raises `InvalidInputError`.

    Args:
        config: A complete configuration of `transformers`.
    """
    if config.model_type != "marian" and not getattr(config, "sinusoidal_pos_embds", False):
        return
    positions, width = config.max_position_embeddings, config.hidden_size
    if positions * width > _MOST_TABLE_NUMBERS:
        raise InvalidInputError(
            f"max_position_embeddings of the model's configuration is {positions}, with vectors of {width} numbers: use at most "
            f"{_MOST_TABLE_NUMBERS // width} positions, because models with sinusoidal positions take long to make"
        )


def _check(key: str, value: object, allowed: _Range) -> None:
    if value is not None and value not in allowed:
        raise InvalidInputError(
            f"{key} of the model's configuration is {value!r:.80}: use {allowed}, in model.config or in the config.json of the "
            "pretrained directory"
        )
