"""Keeps the keys and values of earlier tokens, so that a row can go through a stage in several passes."""

import torch
from torch import Tensor


class KeyValues:
    """The keys and values of the tokens of earlier passes, for the layers of one stage.

    It has the methods of `transformers.Cache` that layers of language models and the functions for their masks call.
    Unlike that class, it needs no layers before those of the stage.
    """

    def __init__(self) -> None:
        self.num_tokens_before = 0
        """Tokens of earlier passes. Set before the first layer of each pass."""
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, **_: object
    ) -> tuple[Tensor, Tensor]:
        """Adds the keys and values of a pass, each [rows, heads, tokens, head size]. Returns those of all passes.

        The layers of `transformers` from 5.24 on also give arguments for other kinds of caches.
        """
        if layer_idx in self._layers:
            earlier_keys, earlier_values = self._layers[layer_idx]
            keys = torch.cat([earlier_keys, keys], dim=-2)
            values = torch.cat([earlier_values, values], dim=-2)
        self._layers[layer_idx] = keys, values
        return keys, values

    def get_query_offset(self, layer_idx: int) -> int:
        """Returns the position of the first token of this pass."""
        return self.num_tokens_before

    def get_mask_sizes(self, num_tokens: int, layer_idx: int) -> tuple[int, int]:
        """Returns the number of keys that a pass over `num_tokens` tokens sees, and the position of the first key."""
        return self.num_tokens_before + num_tokens, 0
