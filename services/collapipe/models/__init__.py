"""Cuts models of `transformers` into units, with one adapter for each model family.

A new family needs a module here and a line in `families`. Importing this package imports no modelling code;
`adapter_class` and `adapter_for` import that of one family.
"""

import os

# `peft` imports `bitsandbytes` where it is installed, which prepares functions for torch's compiler: 3 s and 50 MB more in each
# process. Hosts with a C++ compiler would then run compiled code, and others not. torch reads this whenever it is asked to compile.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from collapipe.models.adapter import ModelAdapter as ModelAdapter
from collapipe.models.configuration import create_config_json as create_config_json
from collapipe.models.families import adapter_class as adapter_class
from collapipe.models.families import adapter_class_for as adapter_class_for
from collapipe.models.families import adapter_for as adapter_for
from collapipe.models.generation import EmitToken as EmitToken
from collapipe.models.generation import GenerationSettings as GenerationSettings
from collapipe.models.generation import TokenChooser as TokenChooser
from collapipe.models.key_values import KeyValues as KeyValues
from collapipe.models.lora import changes_embeddings as changes_embeddings
from collapipe.models.lora import frozen_names as frozen_names
from collapipe.models.pretrained import initial_model as initial_model
from collapipe.models.pretrained import read_frozen as read_frozen
from collapipe.models.quantised_layers import is_quantised as is_quantised
from collapipe.models.quantised_layers import load_quantised as load_quantised
from collapipe.models.quantised_layers import quantisation_library as quantisation_library
from collapipe.models.state import divide_state as divide_state
from collapipe.models.state import join_model as join_model
from collapipe.models.state import save_lora as save_lora
from collapipe.models.state import split_state as split_state
from collapipe.models.tensors_on_disk import TensorsOnDisk as TensorsOnDisk
from collapipe.models.unit import IGNORED as IGNORED
from collapipe.models.unit import Head as Head
from collapipe.models.unit import Side as Side
from collapipe.models.unit import Unit as Unit
