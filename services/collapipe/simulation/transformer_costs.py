"""Parameters, floating-point operations and memory of well-known Transformers, computed from their shapes.

Sources of the formulas:

- Parameters: counted layer by layer, biases included (Vaswani et al. 2017, Devlin et al. 2019, Touvron et al.
  2023).
- Operations of training: 6 for each parameter and token, of which 2 in the forward pass (Kaplan et al. 2020,
  2.1). Attention scores and their products add 12 s^2 h for each block and sample (Narayanan et al. 2021,
  appendix).
- Stash of a block: Korthikanti et al. 2022, section 4.1, count s b h (34 + 5 a s / h) bytes, with values of
  16 bits and dropout masks of one byte for each element. Here all values but the masks have 32 bits. The
  terms of other block types follow the same count.

In formulas, s is the sequence length, h the hidden size, f the feed-forward size and a the number of heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from collapipe.allocation.round_model.problem import BlockShare, ModelCost

STATE_BYTES_PER_PARAMETER = 16
"""Adam in fp32: weight 4, gradient 4, two moments 8. See docs/scheduling.md (10)."""

_FLOAT, _MASK = 4, 1  # bytes


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """The shape of a Transformer.

    Args:
        num_blocks: Blocks of the encoder, or of a model that has only a decoder.
        num_positions: Rows of a learned position embedding. 0 if positions are computed.
        num_token_types: Rows of a token type embedding.
        num_key_value_heads: Set for grouped-query attention. `None` means `num_heads`.
        style: Blocks of `bert` have biases and two layer norms, and a layer norm follows the embedding.
            Blocks of `llama` have no biases, RMS norms and a gated feed-forward layer (SwiGLU).
        head: `pooler` reads the first token. `decoder` has as many blocks as the encoder, with
            cross-attention, and its output is tied to its own embedding. `language_model` is a last norm and
            an output for every token.
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
    def half_block_parameters(self) -> tuple[int, int]:
        """Parameters of the attention of a layer and of its feed-forward network, each with a norm."""
        h, f = self.hidden_size, self.feed_forward_size
        if self.style == "llama":
            return 2 * h * h + 2 * h * self._key_value_size + h, 3 * h * f + h
        return self._attention_parameters + 2 * h, (2 * h * f + f + h) + 2 * h

    @property
    def block_parameters(self) -> int:
        return sum(self.half_block_parameters)

    @property
    def embedding_parameters(self) -> int:
        """Parameters for tokens, positions and token types, and of the norm that follows them."""
        h = self.hidden_size
        rows = self.vocabulary_size + self.num_positions + self.num_token_types
        return rows * h + (2 * h if self.num_positions else 0)

    @property
    def head_parameters(self) -> int:
        """Parameters of the head. The classifier after a pooler is too small to count."""
        h = self.hidden_size
        if self.head == "pooler":
            return h * h + h
        if self.head == "language_model":
            return self.vocabulary_size * h + h
        return self.num_blocks * self._decoder_block_parameters + self.vocabulary_size * h

    def half_block_flops(self, sequence_length: int) -> tuple[float, float]:
        """Returns the operations of both half blocks for one sample, forward and backward."""
        scores = 12 * sequence_length**2 * self.hidden_size
        attention, feed_forward = self.half_block_parameters
        return 6 * attention * sequence_length + scores, 6 * feed_forward * sequence_length

    def block_flops(self, sequence_length: int) -> float:
        """Returns the operations of one block for one sample, forward and backward."""
        return sum(self.half_block_flops(sequence_length))

    def head_flops(self, sequence_length: int) -> float:
        """Returns the operations of the head for one sample, forward and backward."""
        if self.head == "pooler":
            return 6.0 * self.head_parameters
        output = 6.0 * self.vocabulary_size * self.hidden_size * sequence_length
        if self.head == "language_model":
            return output
        block = 6 * self._decoder_block_parameters * sequence_length
        # A decoder block has self-attention and cross-attention.
        attention = 2 * 12 * sequence_length**2 * self.hidden_size
        return output + self.num_blocks * (block + attention)

    def half_block_stash_bytes(self, sequence_length: int) -> tuple[float, float]:
        """Returns the memory that both half blocks keep of one sample for their backward passes."""
        s, h, f = sequence_length, self.hidden_size, self.feed_forward_size
        norm = _FLOAT * s * h
        if self.style == "llama":
            # These are the inputs of query, key and value, of the scores and of the output, and the weights.
            attention = s * (3 * h + 2 * self._key_value_size) + self.num_heads * s * s
            # These are the input, the gate before and after its activation, the other half, and their product.
            feed_forward = s * (h + 4 * f)
            return _FLOAT * attention + norm, norm + _FLOAT * feed_forward
        feed_forward = _FLOAT * s * (h + 2 * f) + _MASK * s * h
        return self._attention_stash_bytes(s) + norm, norm + feed_forward

    def deferred_share(self, sequence_length: int) -> float:
        """Returns the share of the gradients of weights in the operations of a block."""
        block_flops = self.block_flops(sequence_length)
        return 2 * self.block_parameters * sequence_length / block_flops

    def block_stash_bytes(self, sequence_length: int) -> float:
        """Returns the memory that a block keeps of one sample for its backward pass."""
        return sum(self.half_block_stash_bytes(sequence_length))

    def cost(self, sequence_length: int, *, half_blocks: bool = False) -> ModelCost:
        s, h, period = sequence_length, self.hidden_size, 2 if half_blocks else 1
        block_flops = self.block_flops(s) / period
        block_parameters = self.block_parameters / period
        block_stash_bytes = self.block_stash_bytes(s) / period
        halves = zip(
            self.half_block_flops(s),
            self.half_block_parameters,
            self.half_block_stash_bytes(s),
            strict=True,
        )
        pattern = tuple(
            BlockShare(work / block_flops, state / block_parameters, stash / block_stash_bytes)
            for work, state, stash in halves
        )
        return ModelCost(
            num_blocks=period * self.num_blocks,
            block_state_bytes=STATE_BYTES_PER_PARAMETER * block_parameters,
            block_stash_bytes=block_stash_bytes,
            activation_bytes=_FLOAT * s * h,
            # A look-up, additions and a norm, forward and backward, are bound by memory. Together they take
            # the time of about 30 operations for each element.
            embedding_work=30 * s * h / block_flops,
            head_work=self.head_flops(s) / block_flops,
            embedding_state_bytes=STATE_BYTES_PER_PARAMETER * self.embedding_parameters,
            head_state_bytes=STATE_BYTES_PER_PARAMETER * self.head_parameters,
            embedding_stash_bytes=(_FLOAT + _MASK) * s * h,
            head_stash_bytes=self._head_stash_bytes(s),
            pattern=pattern if half_blocks else (BlockShare(),),
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

    def _attention_stash_bytes(self, sequence_length: int) -> float:
        """Returns the stash of an attention layer of `bert`: inputs, scores, and the masks of two dropouts."""
        s, h = sequence_length, self.hidden_size
        scores = self.num_heads * s * s
        return _FLOAT * (5 * s * h + 2 * scores) + _MASK * (s * h + scores)

    def _head_stash_bytes(self, sequence_length: int) -> float:
        s, h = sequence_length, self.hidden_size
        if self.head == "pooler":
            return 2.0 * _FLOAT * h
        logits = 2 * _FLOAT * s * self.vocabulary_size  # with their softmax
        if self.head == "language_model":
            return logits + _FLOAT * s * h
        cross_attention = self._attention_stash_bytes(s) + _FLOAT * s * h
        return logits + self.num_blocks * (self.block_stash_bytes(s) + cross_attention)


_BERT_BASE = Transformer(
    num_blocks=12,
    hidden_size=768,
    feed_forward_size=3072,
    num_heads=12,
    vocabulary_size=30522,
    num_positions=512,
    num_token_types=2,
)
_LLAMA_7B = Transformer(  # Touvron et al. 2023
    num_blocks=32,
    hidden_size=4096,
    feed_forward_size=11008,
    num_heads=32,
    vocabulary_size=32000,
    style="llama",
    head="language_model",
)

TransformerName = Literal["bert-base", "bert-large", "marian-big", "llama-7b", "llama-7b-gqa"]

TRANSFORMERS: Mapping[TransformerName, Transformer] = {
    "bert-base": _BERT_BASE,
    "bert-large": replace(
        _BERT_BASE, num_blocks=24, hidden_size=1024, feed_forward_size=4096, num_heads=16
    ),
    # Transformer (big) of Vaswani et al. 2017 as Marian has it: computed positions and 37,000 shared entries.
    "marian-big": Transformer(
        num_blocks=6,
        hidden_size=1024,
        feed_forward_size=4096,
        num_heads=16,
        vocabulary_size=37000,
        head="decoder",
    ),
    "llama-7b": _LLAMA_7B,
    # Mistral 7B of Jiang et al. 2023: like LLaMA 7B, with 8 heads for keys and values.
    "llama-7b-gqa": replace(_LLAMA_7B, feed_forward_size=14336, num_key_value_heads=8),
}
