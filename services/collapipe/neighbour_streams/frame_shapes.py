"""The tensors with which a stage can compute, so that a frame of a neighbour cannot make it fail in the middle of its work."""

import torch
from torch import Tensor

from collapipe.models import ModelAdapter
from collapipe.rpc import MOST_TOLD
from collapipe.tensors import ACTIVATION, Frame, FrameKind
from collapipe.v1 import plan_pb2

_TOKENS, _MASK, _PREDICTIONS = "input_ids", "attention_mask", "predictions"


class FrameShapes:
    """The tensors that the frames of a session may have.

    Args:
        rows: Rows of a micro-batch. The last one of an evaluation may have fewer.
        has_tokens: Whether frames towards the head have token ids, because no stage before has the embedding.
    """

    def __init__(
        self,
        settings: plan_pb2.SessionSettings,
        adapter: ModelAdapter,
        rows: int,
        *,
        has_tokens: bool,
    ) -> None:
        self._rows = rows
        self._max_length = settings.max_length
        self._positions = adapter.max_length(adapter.config)
        self._width = adapter.config.hidden_size
        self._dtype = adapter.base_dtype
        self._num_tokens = int(adapter.config.vocab_size)
        self._num_classes = adapter.num_classes
        self._task = adapter.task
        self._input = _TOKENS if has_tokens else ACTIVATION

    def mistake_in(self, frame: Frame) -> str:
        """Returns why no stage can compute with a frame, in words; empty if one can."""
        tensors, kind = frame.tensors, frame.kind
        match kind:
            case FrameKind.FORWARD | FrameKind.EVALUATE:
                wanted = [{self._input, _MASK}]
            case FrameKind.GENERATE:
                wanted = [{self._input}]
            case FrameKind.BACKWARD:
                wanted = [set(), {ACTIVATION}]
            case FrameKind.PREDICTION:
                wanted = [{_PREDICTIONS}]
            case _:
                wanted = [set()]
        if tensors.keys() not in wanted:
            return f"the tensors {', '.join(tensors) or 'none'} instead of {', '.join(sorted(wanted[-1])) or 'none'}"
        if _PREDICTIONS in tensors:
            return self._in_predictions(tensors[_PREDICTIONS])
        longest = self._max_length if kind is FrameKind.FORWARD else self._positions
        most = 1 if kind is FrameKind.GENERATE else self._rows
        least = 1 if kind is FrameKind.EVALUATE else most
        for name, tensor in tensors.items():
            is_wide = name == ACTIVATION
            rows_and_tokens = tensor.shape[:2]
            has_shape = (
                tensor.dim() == 2 + is_wide
                and least <= rows_and_tokens[0] <= most
                and 0 < rows_and_tokens[1] <= longest
                and (not is_wide or tensor.shape[2] == self._width)
            )
            dtype = self._dtype if is_wide else torch.int64
            if not has_shape or tensor.dtype is not dtype:
                return (
                    f"{_described(name, tensor)}, where {dtype} with {least} to {most} rows of at most {longest} tokens"
                    f"{f' of {self._width} values' if is_wide else ''} is possible"
                )
        if _MASK in tensors:
            mask, inputs = tensors[_MASK], tensors[self._input]
            # The mask of a slice also covers the slices before it. A stage that trains knows how long these are.
            is_short = mask.shape[1] < inputs.shape[1]
            is_long = mask.shape[1] > inputs.shape[1] and kind is FrameKind.EVALUATE
            if mask.shape[0] != inputs.shape[0] or is_short or is_long:
                return f"{_described(_MASK, mask)}, which is no mask of {_described(self._input, inputs)}"
        if _TOKENS in tensors:
            return _outside(_TOKENS, tensors[_TOKENS], self._num_tokens - 1)
        return ""

    def _in_predictions(self, tensor: Tensor) -> str:
        if tensor.dtype is torch.int64 and tensor.dim() in (1, 2):
            return _outside(_PREDICTIONS, tensor, self._num_classes - 1)
        counts = self._task in ("causal_lm", "instruction")
        if counts and tensor.dtype is torch.float32 and tensor.dim() == 2 and tensor.shape[1] == 2:
            return _outside(_PREDICTIONS, tensor, MOST_TOLD)
        return f"{_described(_PREDICTIONS, tensor)}, where classes, tokens, or two sums for each row of a language model are possible"


def _outside(name: str, tensor: Tensor, largest: float) -> str:
    # After an index outside of a table, CUDA fails in this process until it is restarted. What is not finite is told as a divergence.
    if not ((tensor < 0) | ((tensor > largest) & tensor.isfinite())).any():
        return ""
    return f"{name} from {tensor.min()} to {tensor.max()}, where 0 to {largest:g} are possible"


def _described(name: str, tensor: Tensor) -> str:
    return f"{name} of shape {list(tensor.shape)} and type {tensor.dtype}"
