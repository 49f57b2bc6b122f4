"""What the units of a model cost. `collapipe.stage_runtime.unit_counts` counts it, and estimates use it."""

from pydantic import BaseModel, ConfigDict


class _Counted(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class UnitCost(_Counted):
    """One unit. Operations and kept bytes are those of one sample. Kept bytes are those of the longest one."""

    weights_bytes: int
    """Size of the trained weights, as the unit pushes them."""
    frozen_bytes: int
    """Size of the frozen weights, as a host fetches them. 0 if the unit has none."""
    stash_bytes: int
    """Bytes that a forward pass keeps for the backward pass."""
    flops: float
    """Operations of the forward and the backward pass."""
    gradient_bytes: float
    """Bytes that the backward pass of a micro-batch moves for the gradient of an embedding table."""
    update_bytes: float
    """Bytes that a step of the optimizer moves."""


class ModelCosts(_Counted):
    """A model."""

    units: tuple[UnitCost, ...]
    hidden_size: int
    period: int
    """Blocks of a layer."""
    frozen_memory_share: float = 1.0
    """Memory of a block's frozen weights, divided by their bytes: less than 1 if hosts quantise them."""
    flops_per_second: float | None = None
    """Operations that this machine computes in a second with one thread, timed on a block of the model. `None` if not timed."""
    warnings: tuple[str, ...] = ()
    """About the data, in the words of the training."""
    notes: tuple[str, ...] = ()
    """What the data of the job is, or what was assumed because it is not here."""
    num_rows: tuple[int, ...] = ()
    """Training rows of each cluster; empty if the data is not here."""
    padded_length: int | None = None
    """Mean tokens of a training row with its padding, for which operations are counted. `None` if the data is not here."""


def activation_bytes(hidden_size: int, max_length: int, value_bytes: int = 4) -> int:
    """Returns the bytes of the activation of one row, without an encoding.

    Args:
        max_length: Tokens of the row.
        value_bytes: Bytes of one value. No type has more than 4.
    """
    return hidden_size * max_length * value_bytes
