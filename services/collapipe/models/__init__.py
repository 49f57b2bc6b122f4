"""One adapter per model family: units out, `save_pretrained` back.

Guided tour: `unit` says what a unit is, `adapter` how a model of `transformers` is cut into units,
`encoder_only` and `encoder_decoder` what the families of each kind share, `bert` and its siblings
the rest. `configuration` and `pretrained` make a job's first model, `state` takes models apart and
puts them together.

Importing this package imports no modelling code; `adapter_for` imports that of the one family that
it is asked for.
"""

from collapipe.models.adapter import ModelAdapter
from collapipe.models.configuration import create_config_json
from collapipe.models.families import FAMILIES, adapter_for
from collapipe.models.pretrained import initial_model, pretrained_directory
from collapipe.models.state import join_model, split_state
from collapipe.models.unit import Head, Side, Unit

__all__ = [
    "FAMILIES",
    "Head",
    "ModelAdapter",
    "Side",
    "Unit",
    "adapter_for",
    "create_config_json",
    "initial_model",
    "join_model",
    "pretrained_directory",
    "split_state",
]
