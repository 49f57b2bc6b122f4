"""How a model of `transformers` is cut into units, and what every family shares.

A unit is the family's own module at its own path: the whole model is constructed on the meta
device, where it takes no memory, everything but the unit is dropped, and what is left is allocated.
So the parameters of a unit have the names that they have in the whole model, and the head runs the
model's own `forward`, with the embedding and the blocks taken out.
"""

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from collapipe.errors import InvalidInputError
from collapipe.models.unit import Head, Side, Unit

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class ModelAdapter(ABC):
    """Builds models and units of one family for one task.

    Args:
        task: A key of `model_classes`.
        config_json: The complete configuration, as `create_config_json` wrote it.

    Raises:
        InvalidInputError: The configuration describes no model that can be cut.
    """

    family: ClassVar[str]
    config_class: ClassVar[type["PreTrainedConfig"]]
    model_classes: ClassVar[Mapping[str, type["PreTrainedModel"]]]
    """The class of the whole model, by task."""
    embedding_path: ClassVar[str]
    blocks_path: ClassVar[str]
    """Where the `ModuleList` of the blocks is."""
    defaults: ClassVar[Mapping[str, Any]]
    """Configuration of a model from scratch, where it differs from that of `transformers`."""
    fixed: ClassVar[Mapping[str, Any]] = {}
    """Configuration without which the model could not be cut; nobody may override it."""
    side_names: ClassVar[tuple[str, ...]] = ("attention_mask", "labels")
    """Side tensors that units beyond the embedding need."""

    def __init__(self, task: str, config_json: str) -> None:
        self.task = task
        try:
            self._document: dict[str, Any] = json.loads(config_json)
        except ValueError as error:
            raise InvalidInputError(
                f"the configuration makes no {self.family} model: it is not valid JSON: {error}"
            ) from error
        self.config = self.read_config(self._document)
        self.config._attn_implementation = "sdpa"  # on every host, whatever it would choose
        try:
            self.num_blocks = len(_module_list(self._construct_on_meta(), self.blocks_path))
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise InvalidInputError(
                f"the configuration makes no {self.family} model: {error}; check model.config"
            ) from error
        for key, value in self.fixed.items():
            if getattr(self.config, key) != value:
                raise InvalidInputError(
                    f"the configuration has {key} = {getattr(self.config, key)!r}: a {self.family} "
                    f"model can only be cut with {value!r}; make it with create_config_json"
                )

    @property
    def num_units(self) -> int:
        """Embedding, blocks and head."""
        return self.num_blocks + 2

    def build_model(self) -> "PreTrainedModel":
        """Builds the whole model, in training mode; weights come from torch's random state."""
        return self._construct()

    def build_blank_model(self) -> "PreTrainedModel":
        """Builds the whole model, in training mode; weights are zero."""
        model = self._construct_on_meta()
        self._materialise(model, model)
        return model

    def build_unit(self, unit_index: int) -> Unit | Head:
        """Builds one unit, in training mode, allocating its memory only; weights are zero.

        Draws no random numbers: another unit may be training in the same process.
        """
        unit, model = self._unit_on_meta(unit_index)
        self._materialise(model, model if isinstance(unit, Head) else unit)
        return unit

    def state_names(self, unit_index: int) -> list[str]:
        """Names of the tensors of a unit's state."""
        return list(self._unit_on_meta(unit_index)[0].state_dict())

    def for_export(self, model: "PreTrainedModel") -> "PreTrainedModel":
        """Makes a whole model ready for `save_pretrained`, in place."""
        return model

    @classmethod
    def read_config(cls, values: dict[str, Any]) -> "PreTrainedConfig":
        """Makes a configuration of this family; raises `InvalidInputError`."""
        from huggingface_hub.errors import StrictDataclassError

        try:
            return cls.config_class.from_dict(values)
        except (StrictDataclassError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise InvalidInputError(
                f"the configuration makes no {cls.family} model: {reason}; check model.config"
            ) from error

    @classmethod
    def max_length(cls, config: "PreTrainedConfig") -> int:
        """Longest sequence that the positions allow, in tokens."""
        return int(config.max_position_embeddings)

    def fill_constants(self, model: "PreTrainedModel", module: nn.Module) -> None:
        """Fills what no state carries, position ids and the like, as the whole model does."""
        initialise: Any = model._init_weights
        initialise(module)

    @abstractmethod
    def read_pretrained(self, directory: Path) -> dict[str, Tensor]:
        """Reads what the whole model can use of a pretrained directory, under the model's names."""

    @abstractmethod
    def run_embedding(self, module: nn.Module, side: Side) -> Tensor:
        """Embeds a micro-batch with the module at `embedding_path`, whose blocks are gone."""

    @abstractmethod
    def make_head(self, model: "PreTrainedModel") -> Head:
        """Makes the head of a model whose embedding and blocks are gone."""

    def _construct(self) -> "PreTrainedModel":
        return self.model_classes[self.task](copy.deepcopy(self.config))

    def _construct_on_meta(self) -> "PreTrainedModel":
        with torch.device("meta"):
            return self._construct()

    @torch.no_grad()
    def _materialise(self, model: "PreTrainedModel", root: nn.Module) -> None:
        """Gives memory to all of a model, or to a part of it."""
        _allocate(root)
        for module in root.modules():
            self.fill_constants(model, module)

    def _run_block(self, block: nn.Module, activation: Tensor | None, side: Side) -> Tensor:
        from transformers.masking_utils import (
            create_bidirectional_mask,
        )  # slow; needed on no other path

        assert activation is not None
        mask = create_bidirectional_mask(
            config=self.config, inputs_embeds=activation, attention_mask=side["attention_mask"]
        )
        output: Tensor = block(activation, mask)
        return output

    def _run_embedding(self, module: nn.Module, activation: Tensor | None, side: Side) -> Tensor:
        return self.run_embedding(module, side)

    def _unit_on_meta(self, unit_index: int) -> tuple[Unit | Head, "PreTrainedModel"]:
        """A unit without memory, and what is left of the model that it was cut from."""
        if not 0 <= unit_index < self.num_units:
            raise InvalidInputError(
                f"unit {unit_index} does not exist: the {self.family} model has units 0 to "
                f"{self.num_units - 1}"
            )
        model = self._construct_on_meta()
        unit: Unit | Head
        if 0 < unit_index <= self.num_blocks:
            path = f"{self.blocks_path}.{unit_index - 1}"
            unit = _PathUnit(path, model.get_submodule(path), self._run_block)
        else:
            model.set_submodule(self.blocks_path, nn.ModuleList())
            if unit_index == 0:
                embedding = model.get_submodule(self.embedding_path)
                unit = _PathUnit(self.embedding_path, embedding, self._run_embedding)
            else:
                model.set_submodule(self.embedding_path, _GivenActivation())
                unit = self.make_head(model)
        _leave_out(unit, set(model._keys_to_ignore_on_save or ()))
        _carry_tied_once(unit)
        return unit, model


class ModelHead(Head):
    """A head that is a whole model without embedding and blocks.

    It shares the model's registries instead of holding the model as a child, so that no name gets a
    prefix.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        super().__init__()
        self._parameters = model._parameters
        self._buffers = model._buffers
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self._modules = model._modules
        self._whole = (model,)  # in a tuple, torch does not take it for a child

    @property
    def whole(self) -> Any:
        """The model that runs."""
        return self._whole[0]


def cross_entropy_sum(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Sums the cross entropy over all targets that are not -100."""
    return nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        labels.reshape(-1),
        reduction="sum",
        label_smoothing=label_smoothing,
    )


class _PathUnit(Unit):
    """A unit that is one module, held at the path that it has in the whole model."""

    def __init__(
        self,
        path: str,
        module: nn.Module,
        run: Callable[[nn.Module, Tensor | None, Side], Tensor],
    ) -> None:
        super().__init__()
        parent: nn.Module = self
        *containers, leaf = path.split(".")
        for name in containers:
            parent.add_module(name, nn.Module())
            parent = parent.get_submodule(name)
        parent.add_module(leaf, module)
        self._path = path
        self._run = run

    def forward(self, activation: Tensor | None, side: Side) -> Tensor:
        return self._run(self.get_submodule(self._path), activation, side)


class _GivenActivation(nn.Module):
    """Takes the place of an embedding in a model that is given the output of the last block."""

    def forward(
        self, input_ids: None = None, inputs_embeds: Tensor | None = None, *_: Any, **__: Any
    ) -> Tensor | None:
        return inputs_embeds


def _module_list(model: nn.Module, path: str) -> nn.ModuleList:
    blocks = model.get_submodule(path)
    assert isinstance(blocks, nn.ModuleList)
    return blocks


def _allocate(root: nn.Module) -> None:
    """Gives every tensor memory; unlike `to_empty`, keeps tied parameters tied."""
    allocated: dict[int, nn.Parameter] = {}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in allocated:
                    memory: Any = nn.Parameter(
                        torch.zeros_like(parameter, device="cpu"), parameter.requires_grad
                    )
                    memory._is_hf_initialized = True  # `transformers` draws no numbers for it
                    allocated[id(parameter)] = memory
                module._parameters[name] = allocated[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")


def _leave_out(unit: nn.Module, names: set[str]) -> None:
    """Makes constant tables, which `save_pretrained` does not write, no parameters and no state."""
    for name, parameter in list(unit.named_parameters()):
        if name in names:
            path, _, leaf = name.rpartition(".")
            module = unit.get_submodule(path)
            delattr(module, leaf)
            module.register_buffer(leaf, parameter.detach(), persistent=False)


def _carry_tied_once(unit: nn.Module) -> None:
    """Makes `state_dict` and `load_state_dict` know a tied parameter by its first name only."""
    every = {name for name, _ in unit.named_parameters(remove_duplicate=False)}
    aliases = every - {name for name, _ in unit.named_parameters()}

    def forget(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        for alias in aliases:
            del state[prefix + alias]

    def excuse(_: nn.Module, incompatible: Any) -> None:
        for alias in aliases.intersection(incompatible.missing_keys):
            incompatible.missing_keys.remove(alias)

    if aliases:
        hooks: Any = unit
        hooks.register_state_dict_post_hook(forget)
        hooks.register_load_state_dict_post_hook(excuse)
