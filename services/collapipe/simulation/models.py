"""Sizes of well-known Transformers by formula: parameters, floating-point operations, memory. No weights needed.

Sources of the formulas:

- Parameters: of the layers, bias by bias (Vaswani et al. 2017, Devlin et al. 2019, Touvron et al. 2023).
- Operations of training: 6 a parameter and token, of which 2 forward (Kaplan et al. 2020, 2.1), and 12 s^2 h a block and
  sample for the scores of attention and what they weigh (Narayanan et al. 2021, appendix).
- Stash of a block: Korthikanti et al. 2022, section 4.1, who count s b h (34 + 5 a s / h) bytes at 16 bits with a byte for each element
  of a dropout mask. Here everything but the masks is 32 bits wide, and the terms of other block types follow the same count.

s is the sequence length, h the hidden size, f that of the feed-forward layer, a the number of heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from collapipe.allocation.round_model.problem import ModelCost

STATE_BYTES_PER_PARAMETER = 16
"""Adam in fp32: weight 4, gradient 4, two moments 8: design (10)."""

_FLOAT, _MASK = 4, 1  # bytes


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """The shape of a Transformer.

    Args:
        num_blocks: Encoder blocks (or of a decoder-only model, its blocks).
        hidden_size: h.
        feed_forward_size: f.
        num_heads: a.
        vocabulary_size: Entries of the embedding.
        num_positions: Rows of a learned position embedding; 0 where positions are computed.
        num_token_types: Rows of a token type embedding.
        num_key_value_heads: Fewer than `num_heads` with grouped queries.
        style: `bert` has biases, two layer norms a block and a layer norm after the embedding; `llama` has no biases, RMS norms and a
            gated feed-forward layer (SwiGLU).
        head: `pooler` reads the first token; `decoder` has as many blocks as the encoder, with cross-attention, and an output tied to
            its own embedding; `language_model` is a last norm and an output for every token.
    """

    num_blocks: int
    hidden_size: int
    feed_forward_size: int
    num_heads: int
    vocabulary_size: int
    num_positions: int = 0
    num_token_types: int = 0
    num_key_value_heads: int | None = None
    style: Literal["bert", "llama"] = "bert"
    head: Literal["pooler", "decoder", "language_model"] = "pooler"

    @property
    def block_parameters(self) -> int:
        """Of one block."""
        h, f = self.hidden_size, self.feed_forward_size
        if self.style == "llama":
            return 2 * h * h + 2 * h * self._key_value_size + 3 * h * f + 2 * h
        return self._attention_parameters + (2 * h * f + f + h) + 2 * 2 * h

    @property
    def embedding_parameters(self) -> int:
        """Of tokens, positions, types, and the norm that follows them."""
        h = self.hidden_size
        rows = self.vocabulary_size + self.num_positions + self.num_token_types
        return rows * h + (2 * h if self.num_positions else 0)

    @property
    def head_parameters(self) -> int:
        """Of the head; a pooler's classifier is too small to count."""
        h = self.hidden_size
        if self.head == "pooler":
            return h * h + h
        if self.head == "language_model":
            return self.vocabulary_size * h + h
        return self.num_blocks * self._decoder_block_parameters + self.vocabulary_size * h

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        blocks = self.num_blocks * self.block_parameters
        return self.embedding_parameters + blocks + self.head_parameters

    def block_flops(self, sequence_length: int, *, recompute: bool = False) -> float:
        """Operations of one block for one sample, forward and backward; `recompute` runs forward twice."""
        passes = 8 if recompute else 6
        attention = 2 * passes * sequence_length**2 * self.hidden_size
        return passes * self.block_parameters * sequence_length + attention

    def head_flops(self, sequence_length: int) -> float:
        """Operations of the head for one sample, forward and backward."""
        if self.head == "pooler":
            return 6.0 * self.head_parameters
        output = 6.0 * self.vocabulary_size * self.hidden_size * sequence_length
        if self.head == "language_model":
            return output
        block = 6 * self._decoder_block_parameters * sequence_length
        attention = 2 * 12 * sequence_length**2 * self.hidden_size  # of the decoder, and across
        return output + self.num_blocks * (block + attention)

    def block_stash_bytes(self, sequence_length: int) -> float:
        """What a block keeps of one sample for its backward pass."""
        s, h, f = sequence_length, self.hidden_size, self.feed_forward_size
        scores = self.num_heads * s * s
        norms = 2 * _FLOAT * s * h
        if self.style == "llama":
            # inputs of query, key and value, of the scores, of the output; weights of attention
            attention = _FLOAT * (s * (3 * h + 2 * self._key_value_size) + scores)
            # input; gate before and after its activation, the other half, and their product
            return attention + norms + _FLOAT * s * (h + 4 * f)
        attention = _FLOAT * (5 * s * h + 2 * scores) + _MASK * (s * h + scores)
        return attention + norms + _FLOAT * s * (h + 2 * f) + _MASK * s * h

    def cost(self, sequence_length: int, *, recompute: bool = False) -> ModelCost:
        """What its units cost for samples of a length."""
        s, h = sequence_length, self.hidden_size
        block_flops = self.block_flops(s, recompute=recompute)
        return ModelCost(
            num_blocks=self.num_blocks,
            block_state_bytes=STATE_BYTES_PER_PARAMETER * self.block_parameters,
            block_stash_bytes=self.block_stash_bytes(s),
            activation_bytes=_FLOAT * s * h,
            # a look-up, the additions and a norm, forward and backward: bound by memory, about 30 an element
            embedding_work=30 * s * h / block_flops,
            head_work=self.head_flops(s) / block_flops,
            embedding_state_bytes=STATE_BYTES_PER_PARAMETER * self.embedding_parameters,
            head_state_bytes=STATE_BYTES_PER_PARAMETER * self.head_parameters,
            embedding_stash_bytes=(_FLOAT + _MASK) * s * h,
            head_stash_bytes=self._head_stash_bytes(s),
            recompute=recompute,
        )

    @property
    def _key_value_size(self) -> int:
        heads = self.num_key_value_heads or self.num_heads
        return self.hidden_size * heads // self.num_heads

    @property
    def _attention_parameters(self) -> int:
        return 4 * self.hidden_size * self.hidden_size + 4 * self.hidden_size

    @property
    def _decoder_block_parameters(self) -> int:
        return self.block_parameters + self._attention_parameters + 2 * self.hidden_size

    def _head_stash_bytes(self, sequence_length: int) -> float:
        s, h = sequence_length, self.hidden_size
        if self.head == "pooler":
            return 2.0 * _FLOAT * h
        logits = 2 * _FLOAT * s * self.vocabulary_size  # and their softmax
        if self.head == "language_model":
            return logits + _FLOAT * s * h
        scores = self.num_heads * s * s
        across = _FLOAT * (5 * s * h + 2 * scores) + _MASK * (s * h + scores) + _FLOAT * s * h
        return logits + self.num_blocks * (self.block_stash_bytes(s) + across)


TRANSFORMERS: Mapping[str, Transformer] = {
    "bert-base": Transformer(
        num_blocks=12,
        hidden_size=768,
        feed_forward_size=3072,
        num_heads=12,
        vocabulary_size=30522,
        num_positions=512,
        num_token_types=2,
    ),
    "bert-large": Transformer(
        num_blocks=24,
        hidden_size=1024,
        feed_forward_size=4096,
        num_heads=16,
        vocabulary_size=30522,
        num_positions=512,
        num_token_types=2,
    ),
    # Transformer (big) of Vaswani et al. 2017 in Marian's form: computed positions, 37,000 shared entries
    "marian-big": Transformer(
        num_blocks=6,
        hidden_size=1024,
        feed_forward_size=4096,
        num_heads=16,
        vocabulary_size=37000,
        head="decoder",
    ),
    # LLaMA 7B of Touvron et al. 2023
    "llama-7b": Transformer(
        num_blocks=32,
        hidden_size=4096,
        feed_forward_size=11008,
        num_heads=32,
        vocabulary_size=32000,
        style="llama",
        head="language_model",
    ),
    # Mistral 7B of Jiang et al. 2023: the same with 8 heads for keys and values
    "llama-7b-gqa": Transformer(
        num_blocks=32,
        hidden_size=4096,
        feed_forward_size=14336,
        num_heads=32,
        num_key_value_heads=8,
        vocabulary_size=32000,
        style="llama",
        head="language_model",
    ),
}
"""Shapes by name."""
