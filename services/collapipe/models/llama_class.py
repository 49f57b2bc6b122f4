"""The base of Llama and the families that are built like it: rotary positions, grouped-query attention, RMS norms."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from collapipe.models.decoder_only import DecoderOnlyAdapter, SharedInputs
from collapipe.models.unit import Side


class LlamaClassAdapter(DecoderOnlyAdapter):
    """Cuts a model whose modules have the names of Llama's."""

    embedding_path = "model.embed_tokens"
    blocks_path = "model.layers"
    norm_path = "model.norm"
    attention_parts = frozenset({"input_layernorm", "self_attn"})
    defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    }
    rotary_class: ClassVar[type[nn.Module]]

    def __init__(self, task: str, config_json: str) -> None:
        super().__init__(task, config_json)
        make_rotary: Any = self.rotary_class
        self._rotary = make_rotary(self.config)

    def run_embedding(self, module: nn.Module, side: Side) -> Tensor:
        embedded: Tensor = module(side["input_ids"])
        return embedded

    def rotations(self, activation: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cosines, sines = self._rotary.to(activation.device)(activation, positions)
        return cosines, sines

    def run_layer(self, layer: Any, activation: Tensor, shared: SharedInputs) -> Tensor:
        output: Tensor = layer(activation, **self._attention_inputs(layer, shared))
        return output

    def run_attention(self, layer: Any, activation: Tensor, shared: SharedInputs) -> Tensor:
        attended: Tensor = layer.self_attn(
            layer.input_layernorm(activation), **self._attention_inputs(layer, shared)
        )[0]
        return activation + attended

    def run_feed_forward(self, layer: Any, activation: Tensor) -> Tensor:
        output: Tensor = layer.mlp(layer.post_attention_layernorm(activation))
        return activation + output

    def _attention_inputs(self, layer: Any, shared: SharedInputs) -> dict[str, Any]:
        # A configuration without `layer_types` has a window for all layers or for none.
        types = getattr(self.config, "layer_types", None)
        has_window = types is None or types[layer.self_attn.layer_idx] == "sliding_attention"
        mask = shared.window_mask if has_window else shared.mask
        return {
            "attention_mask": mask,
            "position_embeddings": shared.rotations,
            "past_key_values": shared.earlier,
        }
