"""The settings of a stage, and the results of its steps."""

import hashlib
from dataclasses import dataclass

from collapipe.job import TrainingConfig
from collapipe.models import ModelAdapter
from collapipe.stage_runtime.compute_device import ComputeDevice


def dropout_key(
    seed: int,
    cluster_index: int,
    round_index: int,
    step_index: int,
    micro_batch: int,
    unit: int,
    slice_index: int = 0,
) -> int:
    """Returns the random seed for one unit's pass over one micro-batch or slice. It is the same in every attempt."""
    text = f"{seed}/{cluster_index}/{round_index}/{step_index}/{micro_batch}/{unit}"
    if slice_index:
        text += f"/{slice_index}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """The settings of a stage that stay fixed during one round."""

    adapter: ModelAdapter
    training: TrainingConfig
    device: ComputeDevice
    seed: int
    cluster_index: int
    host_cluster: int = 0
    """The cluster of the deployment, for traces."""
    round_index: int
    stage_index: int
    previous_host: str = ""
    """Id of the host of the stage before; empty at the first stage."""
    next_host: str = ""
    """Id of the host of the stage after; empty at the last stage."""
    in_flight: int
    num_slices: int = 1
    """Slices of a micro-batch."""
    recompute: bool
    first_step: int
    """Optimizer steps of the job before this round."""
    total_steps: int
    """Optimizer steps of the whole job."""


@dataclass
class StepTimes:
    """Seconds of one stage in one step. On an emulated processor, the seconds of that processor."""

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    waiting_seconds: float = 0.0
    total_seconds: float = 0.0


@dataclass(frozen=True)
class StepResult:
    """The result of one mini-batch at one stage."""

    squared_norms: list[float]
    """The squared gradient norm of each trained parameter of the stage."""
    loss: float | None
    """`None` at a stage without the head."""
    times: StepTimes
