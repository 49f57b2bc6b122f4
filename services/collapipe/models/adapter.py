"""Cuts a model of `transformers` into units.

A unit holds one module of the model, under the same path as in the model. An adapter constructs the whole model once, on
the meta device, where tensors take no memory. To build a unit, it copies what the unit needs and allocates the memory of the
copy. So a unit's parameters have the names that they have in the whole model. The head is the whole model
without the embedding and the blocks, and runs the model's own `forward`. LoRA is added before the cut.

With half blocks, a layer of the model becomes two units: its attention and its feed-forward network, each with
the residual connection and the layer norm that follow it.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from collapipe.documents import decode_json
from collapipe.errors import InvalidInputError
from collapipe.finding import Finding
from collapipe.job import LABELLING_TASKS, LoraConfig
from collapipe.models.configuration_ranges import check_position_table, check_ranges
from collapipe.models.key_values import KeyValues
from collapipe.models.lora import add_lora, changes_embeddings, frozen_names
from collapipe.models.pretrained import DRAWING_WEIGHTS, MAKING_MODELS, load_pretrained
from collapipe.models.quantised_layers import (
    frozen_linear_layers,
    quantise_layers,
    quantised_bytes,
)
from collapipe.models.special_tokens import SpecialTokens
from collapipe.models.unit import IGNORED, Head, Side, Unit
from collapipe.pretrained_directories import pretrained_values

if TYPE_CHECKING:
    from peft.tuners.lora import LoraModel
    from tokenizers import Tokenizer
    from transformers import PreTrainedConfig, PreTrainedModel

_UNUSABLE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What `transformers` raises for values that no configuration can have."""


class ModelAdapter(ABC):
    """Builds models and units of one family for one task.

    Args:
        task: A key of `model_classes`.
        config_json: The complete configuration, as `create_config_json` returned it.

    Raises:
        InvalidInputError: The configuration describes no model that can be cut.
    """

    family: ClassVar[str]
    config_class: ClassVar[type["PreTrainedConfig"]]
    model_classes: ClassVar[Mapping[str, type["PreTrainedModel"]]]
    """The class of the whole model, by task."""
    embedding_path: ClassVar[str]
    blocks_path: ClassVar[str]
    """Path of the `ModuleList` of the layers. A layer is a block, or two half blocks."""
    head_parts: ClassVar[tuple[str, ...]] = ()
    """The submodules at `embedding_path` that belong to the head."""
    attention_parts: ClassVar[frozenset[str]]
    """The submodules of a layer that its attention half uses. The feed-forward half uses all others."""
    special_tokens: ClassVar[SpecialTokens]
    defaults: ClassVar[Mapping[str, Any]]
    """Configuration values of a model with random weights, where they differ from those of `transformers`."""
    fixed: ClassVar[Mapping[str, Any]] = {}
    """Configuration values that cutting needs. A job cannot override them."""
    tie_keys: ClassVar[tuple[str, ...]] = ("tie_word_embeddings",)
    """Keys of the configuration that say which embeddings a pretrained model ties."""
    always_trained: ClassVar[tuple[str, ...]] = ()
    """Ends of the names of modules that LoRA trains as a whole, because pretrained models may lack them."""
    continues_text: ClassVar[bool] = False
    """Whether the model predicts the next token of a text."""
    may_freeze_embeddings: ClassVar[bool] = False
    """Whether `model.freeze_embeddings` has a meaning for the family."""

    def __init__(self, task: str, config_json: str) -> None:
        self.task = task
        self._names_by_unit: dict[int, tuple[list[str], dict[str, str]]] = {}
        self._last_shared: tuple[Tensor, KeyValues | None, Any] | None = None
        """The attention mask and the earlier keys and values of the last pass, and its shared inputs."""
        try:
            self._document: dict[str, Any] = decode_json(config_json)
        except ValueError as error:
            raise InvalidInputError(
                f"the configuration of the {self.family} model is not valid JSON: {error}; give the text of a config.json"
            ) from error
        options = self._document if isinstance(self._document, dict) else {}
        self.period = 2 if options.pop("half_blocks", False) else 1
        """Number of blocks that a layer is cut into. Blocks at this distance are alike."""
        self.freezes_embeddings = bool(options.pop("freeze_embeddings", False))
        self.quantises_base = options.pop("base_quantisation", None) is not None
        self._generation: dict[str, Any] | None = options.pop("generation", None)
        lora = options.pop("lora", None)
        self.lora = None if lora is None else LoraConfig.model_validate(lora)
        self.config = self.read_config(self._document)
        # Every host must compute attention alike, so `transformers` must not choose by what is installed.
        self.config._attn_implementation = "sdpa"
        try:
            layers: Any = self.meta_model.get_submodule(self.blocks_path)
        except _UNUSABLE as error:
            raise InvalidInputError(
                f"a {self.family} model cannot be built from its configuration: {error}; check model.config"
            ) from error
        self.num_blocks = self.period * len(layers)
        for key, value in self.fixed.items():
            if getattr(self.config, key) != value:
                raise InvalidInputError(
                    f"the configuration has {key} = {getattr(self.config, key)!r}: a {self.family} "
                    f"model can only be cut with {value!r}; make it with create_config_json"
                )

    @property
    def num_units(self) -> int:
        """The embedding, the blocks and the head."""
        return self.num_blocks + 2

    @property
    def num_classes(self) -> int:
        """Number of values that a label may have: the classes of the job, or the tokens that the head knows."""
        if self.task in LABELLING_TASKS:
            return len(self.config.id2label or {})
        size: Any = getattr(self.config, "decoder_vocab_size", None) or self.config.vocab_size
        return int(size)

    @property
    def end_ids(self) -> set[int | None]:
        """The tokens that end a generated text. `None` stands for no token."""
        ends = (self._generation or {}).get("eos_token_id", self.config.eos_token_id)
        return set(ends) if isinstance(ends, list) else {ends}

    @property
    def base_dtype(self) -> torch.dtype:
        """Type of the weights before LoRA is added, and of the activations between units."""
        configured: Any = self.config.dtype
        dtype: torch.dtype = configured
        return dtype

    @property
    def attention_size(self) -> int:
        """The number of values in the queries of a token: heads times head size, which may differ from the hidden size."""
        heads, config = self.config.num_attention_heads, self.config
        return int(heads * (getattr(config, "head_dim", None) or config.hidden_size // heads))

    @cached_property
    def frozen_memory_share(self) -> float:
        """Memory of the frozen weights of a layer, divided by the size of their file: 1 if none is quantised."""
        if not self.quantises_base:
            return 1.0
        full = saved = 0
        for unit_index in range(1, 1 + self.period):
            unit = self.build_unit_on_meta(unit_index)[0]
            full += sum(p.nbytes for p in unit.parameters() if not p.requires_grad)
            for _, layer in frozen_linear_layers(unit):
                saved += layer.weight.nbytes - quantised_bytes(layer.weight.numel())
        return 1 - saved / full

    @cached_property
    def first_trained_unit(self) -> int:
        """The first unit with trained parameters. No unit before it needs a gradient."""
        return next(self._trained_units())

    @cached_property
    def num_trained_units(self) -> int:
        """Number of units with trained parameters."""
        return sum(1 for _ in self._trained_units())

    def _trained_units(self) -> Iterator[int]:
        for index in range(self.num_units):
            unit, _ = self.build_unit_on_meta(index)
            if any(parameter.requires_grad for parameter in unit.parameters()):
                yield index

    def build_model(self) -> "PreTrainedModel":
        """Builds the whole model in training mode, without LoRA, with random weights.

        They are drawn as fp32, and then converted to `base_dtype`.
        """
        with DRAWING_WEIGHTS:
            return self._construct()

    def _construct(self) -> "PreTrainedModel":
        """Builds what `build_model` returns. Families change this."""
        model = self.model_classes[self.task](copy.deepcopy(self.config))
        if settings := self.generation_settings():
            from transformers import GenerationConfig

            make: Any = GenerationConfig
            model.generation_config = make(**settings)
        # As in `from_pretrained`, tables outside the state, such as those of rotary positions, stay fp32.
        for tensor in model.state_dict(keep_vars=True).values():
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(self.base_dtype)
        return model

    def build_on_meta(self) -> "tuple[PreTrainedModel, LoraModel | None]":
        """Builds the whole model in training mode, without memory. Returns also its LoRA if the job has it."""
        with MAKING_MODELS, torch.device("meta"):  # LoRA has torch's default type.
            model = self._construct()
            return model, self.add_lora(model)

    @cached_property
    def meta_model(self) -> "PreTrainedModel":
        """The whole model of `build_on_meta`, built once, because that takes long. It may only be read, or copied."""
        return self.build_on_meta()[0]

    def build_blank_model(self) -> "tuple[PreTrainedModel, LoraModel | None]":
        """Builds what `build_on_meta` builds, in memory. The weights are zero."""
        model, lora = self.build_on_meta()
        self._allocate(model, model)
        return model, lora

    def add_lora(self, model: "PreTrainedModel") -> "LoraModel | None":
        """Adds the job's LoRA to a whole model, in place. `None` for a job without it."""
        if self.lora is None:
            return None
        lora = add_lora(model, self.lora, self.always_trained)
        if self.freezes_embeddings and changes_embeddings(model):
            raise InvalidInputError(
                "model.freeze_embeddings is set, but model.lora changes the embedding or the output layer: remove the "
                "setting, or leave them out of target_modules and modules_to_save"
            )
        return lora

    def generation_settings(self) -> dict[str, Any]:
        """Returns the settings of `generation_config.json`. Without any, `transformers` takes them from the configuration."""
        return self._generation or {}

    def forget_pass(self) -> None:
        """Frees what the last pass of blocks has left, which may be the keys and values of a long text."""
        self._last_shared = None

    def build_unit(self, unit_index: int) -> Unit | Head:
        """Builds one unit in training mode; its weights are zero.

        Allocates memory for this unit only. Draws no random numbers, because another unit may be training in
        the same process.
        """
        unit, model = self.build_unit_on_meta(unit_index)
        if self.quantises_base and 0 < unit_index <= self.num_blocks:
            quantise_layers(unit, self.base_dtype)
        self.allocate_unit(unit, model)
        return unit

    def allocate_unit(self, unit: Unit | Head, model: "PreTrainedModel") -> None:
        """Allocates a unit, given what `build_unit_on_meta` returned. The weights are zero."""
        self._allocate(model, model if isinstance(unit, Head) else unit)

    def state_names(self, unit_index: int) -> list[str]:
        """Returns the names of the tensors of a unit's state."""
        return list(self._names(unit_index)[0])

    def frozen_names(self, unit_index: int) -> dict[str, str]:
        """Returns the names of the frozen tensors of a unit: see `collapipe.models.lora.frozen_names`."""
        return self._names(unit_index)[1]

    def _names(self, unit_index: int) -> tuple[list[str], dict[str, str]]:
        """Returns what `state_names` and `frozen_names` return."""
        if unit_index not in self._names_by_unit:
            unit = self.build_unit_on_meta(unit_index)[0]
            self._names_by_unit[unit_index] = list(unit.state_dict()), frozen_names(unit)
        return self._names_by_unit[unit_index]

    def for_export(self, model: "PreTrainedModel") -> "PreTrainedModel":
        """Makes a whole model ready for `save_pretrained`, in place."""
        return model

    @classmethod
    def read_config(cls, values: dict[str, Any]) -> "PreTrainedConfig":
        """Makes a configuration of this family; raises `InvalidInputError`."""
        from huggingface_hub.errors import StrictDataclassError

        try:
            check_ranges(values)
            config = cls.config_class.from_dict(values)
            check_position_table(config)
            return config
        except (StrictDataclassError, *_UNUSABLE) as error:
            reason = " ".join(str(error).split())
            raise InvalidInputError(
                f"a {cls.family} model cannot be built from its configuration: {reason}; check model.config"
            ) from error

    @classmethod
    def max_length(cls, config: "PreTrainedConfig") -> int:
        """Returns the number of tokens that the model has positions for."""
        return int(config.max_position_embeddings)

    @classmethod
    def special_token_ids(
        cls, tokenizer: "Tokenizer", declared: Mapping[str, str] = MappingProxyType({})
    ) -> dict[str, int]:
        """Returns the ids of the special tokens by role.

        Args:
            declared: The special tokens that a pretrained directory names, by role. The others are those of the family.

        Raises:
            InvalidInputError: The vocabulary lacks one that it must have.
        """
        ids: dict[str, int] = {}
        for role, token in cls.roles_in(tokenizer, declared).items():
            token_id = tokenizer.token_to_id(token)
            if token_id is None:
                raise InvalidInputError(
                    f"the vocabulary has no {token!r}, the {role} of family {cls.family!r}: set "
                    f"model.family to that of the pretrained directory, or name its {role} in its tokenizer_config.json"
                )
            ids[role] = token_id
        return ids

    @classmethod
    def roles_in(cls, tokenizer: "Tokenizer", declared: Mapping[str, str]) -> Mapping[str, str]:
        """Returns the special tokens that a vocabulary must have, by role; `declared` as in `special_token_ids`."""
        return {**cls.special_tokens.by_role, **declared}

    @classmethod
    def prepare_tokenizer(cls, tokenizer: "Tokenizer") -> None:
        """Sets how a vocabulary that is made for a job divides text into words, and how it joins tokens."""
        from tokenizers import decoders, pre_tokenizers

        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])

    @classmethod
    def vocabulary_values(cls, tokenizer: "Tokenizer") -> dict[str, Any]:
        """Returns the configuration values that follow from the vocabulary of a model with random weights."""
        ids = cls.special_token_ids(tokenizer)
        return {
            "vocab_size": tokenizer.get_vocab_size(),
            "pad_token_id": ids["pad_token"],
            "bos_token_id": ids.get("bos_token", ids.get("cls_token")),
            "eos_token_id": ids.get("eos_token", ids.get("sep_token")),
        }

    def fill_constants(self, model: "PreTrainedModel", module: nn.Module) -> None:
        """Fills the tensors that are part of no state, such as position ids, as the whole model does."""
        initialise: Any = model._init_weights
        initialise(module)

    def read_pretrained(
        self, directory: Path, otherwise: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Reads the weights of a pretrained directory, by their names in the model.

        Embeddings that the pretrained model ties become copies of each other.

        Args:
            otherwise: The weights of the model where the directory has none.
        """
        config = copy.deepcopy(self.config)
        theirs = self.read_config(pretrained_values(directory))
        for key in self.tie_keys:
            setattr(config, key, getattr(theirs, key))
        return load_pretrained(self.model_classes[self.task], directory, config, self.base_dtype)

    def describe_pretrained(self, directory: Path) -> list[Finding]:
        """Says what a person should know about how the weights of a pretrained directory are used."""
        theirs = self.read_config(pretrained_values(directory))
        is_trained = not self.freezes_embeddings and (
            self.lora is None or changes_embeddings(self.meta_model)
        )
        if not is_trained or not getattr(theirs, self.tie_keys[0]):
            return []
        what, remedy = "encoder and its decoder share one embedding", "use LoRA"
        if self.may_freeze_embeddings:
            what = "token embedding and its output layer are the same weights"
            remedy = "set model.freeze_embeddings, or use LoRA"
        return [
            Finding(
                "warning",
                str(directory),
                f"its {what}. CollaPipe trains them as two copies on different hosts. They become different, so the result is not "
                "that of plain transformers in one process",
                f"{remedy} to keep them equal",
            )
        ]

    def make_shared_inputs(
        self, activation: Tensor, attention_mask: Tensor, earlier: KeyValues | None
    ) -> Any:
        """Makes what all layers of a stage need for a pass: here the mask that their `forward` takes.

        Args:
            attention_mask: Covers the tokens of earlier passes, too: [rows, tokens before + tokens of the activation].
            earlier: Keys and values of earlier passes. Only families that continue text use them.
        """
        # The import is slow, and only hosts that run blocks need it.
        from transformers.masking_utils import create_bidirectional_mask

        return create_bidirectional_mask(
            config=self.config, inputs_embeds=activation, attention_mask=attention_mask
        )

    def run_layer(self, layer: Any, activation: Tensor, shared: Any) -> Tensor:
        """Runs a whole layer, given what `make_shared_inputs` returned."""
        output: Tensor = layer(activation, shared)
        return output

    @abstractmethod
    def run_embedding(self, module: nn.Module, side: Side) -> Tensor:
        """Embeds a micro-batch with the module at `embedding_path`, from which the blocks were removed."""

    @abstractmethod
    def run_attention(self, layer: Any, activation: Tensor, shared: Any) -> Tensor:
        """Runs the attention half of a layer, given what `make_shared_inputs` returned."""

    @abstractmethod
    def run_feed_forward(self, layer: Any, activation: Tensor) -> Tensor:
        """Runs the feed-forward half of a layer."""

    @abstractmethod
    def make_head(self, model: "PreTrainedModel") -> Head:
        """Makes the head from a model without blocks, which has only `head_parts` of its embedding."""

    def build_unit_on_meta(self, unit_index: int) -> tuple[Unit | Head, "PreTrainedModel"]:
        """Returns a unit on the meta device, and a model with its constants and its ways to initialise them.

        For the embedding and the head, the model is a copy without blocks. For a block it is `meta_model`, which nobody may change.
        """
        if not 0 <= unit_index < self.num_units:
            raise InvalidInputError(
                f"unit {unit_index} does not exist: the {self.family} model has units 0 to "
                f"{self.num_units - 1}"
            )
        model = self.meta_model
        unit: Unit | Head
        if 0 < unit_index <= self.num_blocks:
            layer_index, half = divmod(unit_index - 1, self.period)
            path = f"{self.blocks_path}.{layer_index}"
            layer, run = copy.deepcopy(model.get_submodule(path)), self._run_block
            if self.period == 2:
                run = self._run_feed_forward if half else self._run_attention
                for name, _ in list(layer.named_children()):
                    if (name in self.attention_parts) == bool(half):
                        delattr(layer, name)
            unit = _PathUnit(path, layer, run)
            unit.has_attention = not half
        else:
            # A copy without blocks: what is in the memo is not copied, but replaced.
            memo = {id(model.get_submodule(self.blocks_path)): nn.ModuleList()}
            model = copy.deepcopy(model, memo)
            embedding = model.get_submodule(self.embedding_path)
            embedding_of_head = _EmbeddingOfHead()
            for name in self.head_parts:
                embedding_of_head.add_module(name, embedding.get_submodule(name))
                delattr(embedding, name)
            if unit_index == 0:
                unit = _PathUnit(self.embedding_path, embedding, self._run_embedding)
            else:
                model.set_submodule(self.embedding_path, embedding_of_head)
                unit = self.make_head(model)
        _turn_constants_into_buffers(unit, set(model._keys_to_ignore_on_save or ()))
        _name_tied_parameters_once(unit)
        return unit, model

    @torch.no_grad()
    def _allocate(self, model: "PreTrainedModel", root: nn.Module) -> None:
        """Allocates all tensors of `root`, which is a model or a unit that was cut from it."""
        _allocate_zeros(root)
        for module in root.modules():
            self.fill_constants(model, module)

    def _run_block(
        self, layer: nn.Module, activation: Tensor | None, side: Side, earlier: KeyValues | None
    ) -> Tensor:
        assert activation is not None
        return self.run_layer(layer, activation, self.shared_inputs(activation, side, earlier))

    def _run_attention(
        self, layer: nn.Module, activation: Tensor | None, side: Side, earlier: KeyValues | None
    ) -> Tensor:
        assert activation is not None
        return self.run_attention(layer, activation, self.shared_inputs(activation, side, earlier))

    def _run_feed_forward(
        self, layer: nn.Module, activation: Tensor | None, side: Side, earlier: KeyValues | None
    ) -> Tensor:
        assert activation is not None
        return self.run_feed_forward(layer, activation)

    def shared_inputs(
        self, activation: Tensor, side: Side, earlier: KeyValues | None = None
    ) -> Any:
        """Returns what all blocks of a stage need for a pass. It is made once for all of them."""
        attention_mask = side["attention_mask"]
        # Another thread may run blocks of the same adapter, so the entry is read and replaced as a whole.
        last = self._last_shared
        if last is None or last[0] is not attention_mask or last[1] is not earlier:
            shared = self.make_shared_inputs(activation, attention_mask, earlier)
            self._last_shared = last = (attention_mask, earlier, shared)
        return last[2]

    def _run_embedding(
        self, module: nn.Module, activation: Tensor | None, side: Side, earlier: KeyValues | None
    ) -> Tensor:
        return self.run_embedding(module, side)


class ModelHead(Head):
    """A head that is a whole model without embedding and blocks.

    The head shares the registries of the model instead of having the model as a child module. So the names of
    its parameters are those of the model, without a prefix.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        super().__init__()
        self._parameters = model._parameters
        self._buffers = model._buffers
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self._modules = model._modules
        self._whole_model = (model,)  # torch does not register a tuple as a child module

    @property
    def whole_model(self) -> Any:
        """The model whose `forward` the head runs."""
        return self._whole_model[0]


def cross_entropy_sum(logits: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
    """Returns the sum of the cross entropy, in fp32 or more."""
    return nn.functional.cross_entropy(
        as_fp32_or_more(logits).reshape(-1, logits.shape[-1]),
        labels.reshape(-1),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=label_smoothing,
    )


def as_fp32_or_more(logits: Tensor) -> Tensor:
    """Converts logits of a 16-bit type, which is too coarse for losses."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class _PathUnit(Unit):
    """A unit that is one module, at the path that it has in the whole model."""

    def __init__(
        self,
        path: str,
        module: nn.Module,
        run: Callable[[nn.Module, Tensor | None, Side, KeyValues | None], Tensor],
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

    def forward(
        self, activation: Tensor | None, side: Side, earlier: KeyValues | None = None
    ) -> Tensor:
        return self._run(self.get_submodule(self._path), activation, side, earlier)


class _EmbeddingOfHead(nn.Module):
    """Replaces the embedding in a head: returns the activation that the last block passed to the head."""

    def forward(
        self, input_ids: None = None, inputs_embeds: Tensor | None = None, *_: Any, **__: Any
    ) -> Tensor | None:
        return inputs_embeds


def _allocate_zeros(root: nn.Module) -> None:
    """Allocates every tensor on the meta device. Unlike `to_empty`, it keeps tied parameters tied."""
    allocated: dict[int, nn.Parameter] = {}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
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


def _turn_constants_into_buffers(unit: nn.Module, names: set[str]) -> None:
    """Turns constant tables, which `save_pretrained` does not write, into buffers outside the state."""
    for name, parameter in list(unit.named_parameters()):
        if name in names:
            path, _, leaf = name.rpartition(".")
            module = unit.get_submodule(path)
            delattr(module, leaf)
            module.register_buffer(leaf, parameter.detach(), persistent=False)


def _name_tied_parameters_once(unit: nn.Module) -> None:
    """Makes `state_dict` and `load_state_dict` use only the first name of a tied parameter."""
    all_names = {name for name, _ in unit.named_parameters(remove_duplicate=False)}
    aliases = all_names - {name for name, _ in unit.named_parameters()}

    def drop_aliases(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        for alias in aliases:
            del state[prefix + alias]

    def accept_missing_aliases(_: nn.Module, incompatible: Any) -> None:
        for alias in aliases.intersection(incompatible.missing_keys):
            incompatible.missing_keys.remove(alias)

    if aliases:
        hooks: Any = unit
        hooks.register_state_dict_post_hook(drop_aliases)
        hooks.register_load_state_dict_post_hook(accept_missing_aliases)
