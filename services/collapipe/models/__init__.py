"""Cuts models of `transformers` into units, with one adapter for each model family.

A new family needs a module here and a line in `families`. Importing this package imports no modelling code;
`adapter_class` and `adapter_for` import that of one family.
"""

from collapipe.models.adapter import ModelAdapter
from collapipe.models.configuration import create_config_json
from collapipe.models.families import adapter_class, adapter_for
from collapipe.models.pretrained import initial_model, pretrained_directory
from collapipe.models.state import join_model, split_state
from collapipe.models.unit import Head, Side, Unit

__all__ = [
    "Head",
    "ModelAdapter",
    "Side",
    "Unit",
    "adapter_class",
    "adapter_for",
    "create_config_json",
    "initial_model",
    "join_model",
    "pretrained_directory",
    "split_state",
]
