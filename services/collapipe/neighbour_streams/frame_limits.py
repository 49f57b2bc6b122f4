"""The most memory that the frames of a plan need, so that a neighbour cannot fill the memory of a stage."""

from collections.abc import Collection, Mapping

from collapipe.job import TrainingConfig
from collapipe.models import ModelAdapter
from collapipe.tensors import MAX_FRAME_BYTES, FrameKind, decoded_width
from collapipe.unit_costs import activation_bytes
from collapipe.v1 import plan_pb2

_INTEGER_BYTES = 8
"""Bytes of a token id, a value of a mask, a label or a predicted token."""


def frame_limits(
    plan: plan_pb2.Plan,
    settings: plan_pb2.SessionSettings,
    training: TrainingConfig,
    adapter: ModelAdapter,
) -> dict[FrameKind, int]:
    """Returns the most bytes that decoding a frame of each kind takes. Kinds that do not occur in a session are left out.

    Activations are as large as in the estimates, in fp32 and with what a codec adds to a narrow row. Beside them there is room
    for token ids and a mask.
    """
    rows = rows_of_micro_batch(plan, training)
    length, positions = settings.max_length, adapter.max_length(adapter.config)
    # The last slices may have a token more than the first ones.
    slice_length = -(-length // (plan.num_slices or 1))
    # A translation has at most one token for each position, and a token is predicted for each of a row.
    predicted = max(length, positions) if adapter.task == "translation" else length

    width = decoded_width(adapter.config.hidden_size)

    def activation(rows: int, length: int) -> int:
        return rows * activation_bytes(width, length)

    def integers(rows: int, length: int) -> int:
        return _INTEGER_BYTES * rows * length

    limits = {
        FrameKind.EVALUATE: activation(rows, length) + 2 * integers(rows, length),
        FrameKind.PREDICTION: integers(rows, predicted),
        FrameKind.LABELS: integers(rows, length),
    }
    if settings.is_use:
        # A text is one row, and may be as long as the model allows.
        limits[FrameKind.GENERATE] = activation(1, positions) + integers(1, positions)
        limits[FrameKind.END_GENERATION] = 0
    else:
        limits[FrameKind.FORWARD] = activation(rows, slice_length) + 2 * integers(rows, length)
        limits[FrameKind.BACKWARD] = activation(rows, slice_length)
    return {kind: min(num_bytes, MAX_FRAME_BYTES) for kind, num_bytes in limits.items()}


def rows_of_micro_batch(plan: plan_pb2.Plan, training: TrainingConfig) -> int:
    """Returns the rows of each micro-batch in training, and the most of one in an evaluation."""
    return max(1, training.mini_batch // (plan.num_micro_batches or 1))


def of_kinds(limits: Mapping[FrameKind, int], kinds: Collection[FrameKind]) -> dict[FrameKind, int]:
    """Returns the limits of some kinds."""
    return {kind: limit for kind, limit in limits.items() if kind in kinds}
