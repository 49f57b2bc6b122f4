"""The base of the families that translate. The encoder is in the pipeline, the whole decoder in the head.

The encoder's embedding is not tied to the decoder's, because they are on different hosts. The decoder's
embedding and the output layer are tied within the head.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from collapipe.models.adapter import ModelAdapter, ModelHead, cross_entropy_sum
from collapipe.models.generation import EmitToken, TokenChooser
from collapipe.models.unit import Side

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel


class EncoderDecoderAdapter(ModelAdapter):
    """Cuts models that translate."""

    embedding_path = "model.encoder"
    blocks_path = "model.encoder.layers"
    attention_parts = frozenset({"self_attn", "self_attn_layer_norm"})
    defaults: ClassVar[Mapping[str, Any]] = {
        "d_model": 256,
        "encoder_layers": 3,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 1024,
        "decoder_ffn_dim": 1024,
        "dropout": 0.1,
        "scale_embedding": True,
    }
    decoder_start_role: ClassVar[str]
    """The role of the special token that decoding starts from."""

    def generation_settings(self) -> dict[str, Any]:
        keys = ("pad", "bos", "eos", "forced_eos", "decoder_start")
        return {
            **{f"{key}_token_id": getattr(self.config, f"{key}_token_id") for key in keys},
            **super().generation_settings(),
            "max_new_tokens": self._document["max_new_tokens"],
            "do_sample": False,
            "num_beams": 1,
        }

    @classmethod
    def vocabulary_values(cls, tokenizer: "Tokenizer") -> dict[str, Any]:
        values = super().vocabulary_values(tokenizer)
        start = cls.special_token_ids(tokenizer)[cls.decoder_start_role]
        return values | {
            "decoder_start_token_id": start,
            "forced_eos_token_id": values["eos_token_id"],
        }

    def run_embedding(self, module: nn.Module, side: Side) -> Tensor:
        embedded: Tensor = module(side["input_ids"]).last_hidden_state
        return embedded

    def run_attention(self, layer: Any, activation: Tensor, mask: Tensor | None) -> Tensor:
        attended: Tensor = layer.self_attn(activation, attention_mask=mask)[0]
        attended = nn.functional.dropout(attended, layer.dropout, layer.training)
        output: Tensor = layer.self_attn_layer_norm(activation + attended)
        return output

    def run_feed_forward(self, layer: Any, activation: Tensor) -> Tensor:
        hidden: Tensor = layer.activation_fn(layer.fc1(activation))
        hidden = nn.functional.dropout(hidden, layer.activation_dropout, layer.training)
        hidden = nn.functional.dropout(layer.fc2(hidden), layer.dropout, layer.training)
        output: Tensor = layer.final_layer_norm(activation + hidden)
        return output

    def make_head(self, model: "PreTrainedModel") -> "DecoderHead":
        return DecoderHead(model)


class DecoderHead(ModelHead):
    """The decoder and the output layer."""

    def loss_sum(self, activation: Tensor, side: Side, label_smoothing: float) -> Tensor:
        labels = side["labels"]
        logits = self.whole_model(
            encoder_outputs=_encoder_outputs(activation),
            attention_mask=side["attention_mask"],
            decoder_input_ids=self.whole_model.prepare_decoder_input_ids_from_labels(labels),
            use_cache=False,
        ).logits
        return cross_entropy_sum(logits, labels, label_smoothing)

    @torch.no_grad()
    def predict(self, activation: Tensor, side: Side) -> Tensor:
        """Translates greedily. Rows that end early are padded."""
        tokens: Tensor = self.whole_model.generate(
            encoder_outputs=_encoder_outputs(activation), attention_mask=side["attention_mask"]
        )
        return tokens[:, 1:]  # without the start token

    @torch.no_grad()
    def generate(
        self, activation: Tensor, side: Side, chooser: TokenChooser, emit: EmitToken
    ) -> None:
        from transformers import LogitsProcessorList

        def only_the_chosen(tokens: Tensor, scores: Tensor) -> Tensor:
            # `generate` takes the most probable token, so it takes the only one that is left. If it drew tokens itself, it
            # would use torch's random state, which belongs to the process.
            chosen = chooser.choose(scores)
            left: Tensor = torch.full_like(scores, -torch.inf)
            left[:, chosen] = 0
            return left

        self.whole_model.generate(
            encoder_outputs=_encoder_outputs(activation),
            attention_mask=side["attention_mask"],
            max_new_tokens=chooser.settings.max_new_tokens,
            logits_processor=LogitsProcessorList([only_the_chosen]),
            streamer=_Streamer(emit),
        )


class _Streamer:
    """Receives the tokens of `generate`, which puts the start token first."""

    def __init__(self, emit: EmitToken) -> None:
        self._emit = emit
        self._has_started = False

    def put(self, tokens: Tensor) -> None:
        if self._has_started:
            self._emit(int(tokens))
        self._has_started = True

    def end(self) -> None:
        pass


def _encoder_outputs(activation: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=activation)
