"""The base of the families that continue text. All their layers are blocks, and the head is the last norm and the
output layer.

The output layer has its own copy of the token embedding, because they are on different hosts. Both are trained, or both
are frozen: then they stay equal.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from collapipe.models.adapter import (
    ModelAdapter,
    ModelHead,
    as_fp32_or_more,
    cross_entropy_sum,
)
from collapipe.models.generation import EmitToken, TokenChooser
from collapipe.models.key_values import KeyValues
from collapipe.models.unit import Side

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class SharedInputs:
    """What all layers of a stage need for a micro-batch."""

    mask: Tensor | None
    """The causal mask. `None` stands for one without padding."""
    window_mask: Tensor | None
    """The same for layers that see only a window of the tokens before."""
    rotations: tuple[Tensor, Tensor] | None
    """Cosines and sines of rotary positions, each [1, length, head size]."""
    earlier: KeyValues | None
    """Keys and values of earlier passes."""


class DecoderOnlyAdapter(ModelAdapter):
    """Cuts models that predict the next token."""

    norm_path: ClassVar[str]
    """Path of the norm behind the last layer."""
    may_have_windows: ClassVar[bool] = False
    """Whether `sliding_window` of the configuration has a meaning for the family."""
    fixed = {"tie_word_embeddings": False}
    continues_text = True
    may_freeze_embeddings = True

    def _construct(self) -> "PreTrainedModel":
        model = super()._construct()
        if self.freezes_embeddings:
            untyped: Any = model
            untyped.get_input_embeddings().requires_grad_(False)
            untyped.get_output_embeddings().requires_grad_(False)
        return model

    @classmethod
    def roles_in(cls, tokenizer: "Tokenizer", declared: Mapping[str, str]) -> Mapping[str, str]:
        """Returns the special tokens by role. Only the end token must exist. Without a token for padding, it pads."""
        roles = {
            role: token
            for role, token in super().roles_in(tokenizer, declared).items()
            if role == "eos_token" or tokenizer.token_to_id(token) is not None
        }
        roles.setdefault("pad_token", roles["eos_token"])
        return roles

    def make_shared_inputs(
        self, activation: Tensor, attention_mask: Tensor, earlier: KeyValues | None
    ) -> SharedInputs:
        # The import is slow, and only hosts that run blocks need it.
        from transformers import masking_utils

        positions = positions_of_pass(activation, attention_mask)
        if earlier is not None:
            earlier.num_tokens_before = attention_mask.shape[1] - activation.shape[1]
        given: dict[str, Any] = {
            "config": self.config,
            "inputs_embeds": activation,
            "attention_mask": attention_mask,
            "past_key_values": earlier,
            "position_ids": positions,
        }
        mask: Any = masking_utils.create_causal_mask(**given)
        window_mask: Any = mask
        if self.may_have_windows and self.config.sliding_window is not None:
            window_mask = masking_utils.create_sliding_window_causal_mask(**given)
        return SharedInputs(mask, window_mask, self.rotations(activation, positions), earlier)

    def rotations(self, activation: Tensor, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """Returns the cosines and sines of rotary positions. `None` for a family without them."""
        return None

    def make_head(self, model: "PreTrainedModel") -> "LanguageHead":
        return LanguageHead(model, self.norm_path)


def positions_of_pass(tokens: Tensor, attention_mask: Tensor) -> Tensor:
    """Returns the positions of the tokens of a pass, [1, tokens]: the last ones that the attention mask covers.

    Args:
        tokens: Token ids or activations of the pass, [rows, tokens, ...].
    """
    stop = attention_mask.shape[1]
    return torch.arange(stop - tokens.shape[1], stop, device=tokens.device).unsqueeze(0)


class LanguageHead(ModelHead):
    """The last norm and the output layer.

    A label is the token that follows its position, so labels are shifted already.
    """

    def __init__(self, model: "PreTrainedModel", norm_path: str) -> None:
        super().__init__(model)
        self._norm_path = norm_path

    def loss_sum(self, activation: Tensor, side: Side, label_smoothing: float) -> Tensor:
        return cross_entropy_sum(self._logits(activation), side["labels"], label_smoothing)

    @torch.no_grad()
    def predict(self, activation: Tensor, side: Side) -> Tensor:
        """Returns the sum of the losses of each row and its number of right tokens, [rows, 2], as float32."""
        logits, labels = as_fp32_or_more(self._logits(activation)), side["labels"]
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        num_right = (logits.argmax(dim=-1) == labels).sum(dim=1)
        return torch.stack([losses.sum(dim=1), num_right.to(losses.dtype)], dim=1)

    @torch.no_grad()
    def generate(
        self, activation: Tensor, side: Side, chooser: TokenChooser, emit: EmitToken
    ) -> None:
        logits = self._logits(activation[:, -1:])[:, -1]
        logits[:, self._forbidden_ids] = -torch.inf
        emit(chooser.choose(logits))

    @cached_property
    def _forbidden_ids(self) -> list[int]:
        """The tokens that the settings of generation forbid. A list of several tokens would need those before, and is left out."""
        settings = self.whole_model.generation_config
        words = [each for each in settings.bad_words_ids or () if len(each) == 1]
        return [*(token for [token] in words), *(settings.suppress_tokens or ())]

    def _logits(self, activation: Tensor) -> Tensor:
        logits: Tensor = self.get_submodule("lm_head")(
            self.get_submodule(self._norm_path)(activation)
        )
        return logits
