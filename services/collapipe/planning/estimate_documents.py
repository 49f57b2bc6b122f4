"""What an estimate is asked, and what it answers, as JSON documents."""

from pydantic import BaseModel, ConfigDict

from collapipe.emulation.boxes import Box
from collapipe.job import JobConfig

PROCESS_BYTES = 430_000_000
"""Resident memory of a host with a tiny model: Python, torch and the model's code. It was measured on x86-64. It is no part
of the memory that training may use."""


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class Request(_Document):
    """A job and the boxes that would run it. All clusters have the same devices."""

    job: JobConfig
    devices: tuple[Box, ...]
    control_unit: Box | None = None
    """`None` stands for a laptop that gives no memory to blocks."""
    edge_server: Box | None = None
    end_flops_per_second: float | None = None
    """Speed of those laptops. `None` means that of the profile."""
    core_share: float | None = None
    """Set if the hosts are processes of this machine: the share of a core that each has. Boxes without `flops_per_second` then
    have the speed that is timed here."""


class HostEstimate(_Document):
    """One host. Memory is in bytes, with a full window of micro-batches."""

    host_id: str
    profile: str
    start_unit: int
    stop_unit: int
    num_blocks: int
    recompute: bool
    needed_bytes: float
    given_bytes: int | None
    """Memory that training may use. `None` means that nothing limits it here."""
    weights_bytes: float
    """Trained weights."""
    frozen_bytes: float
    optimizer_bytes: float
    """Gradients, moments, and what lossy uploads keep."""
    activation_bytes: float
    """Activations that wait for their backward pass, and those in the queues."""
    process_bytes: int
    """Code of the process. It comes on top of the memory that training may use."""
    micro_batch_seconds: float
    """Of a slice if micro-batches are cut."""
    pushed_bytes: float
    """In each round."""
    fetched_bytes: float
    """In each round but the first."""
    first_fetched_bytes: float
    """In the first round."""

    @property
    def fits(self) -> bool:
        return self.given_bytes is None or self.needed_bytes <= self.given_bytes


class LinkEstimate(_Document):
    """The link between two neighbouring stages: bytes of a step, and seconds of a micro-batch or slice."""

    sender: str
    receiver: str
    codec: str
    forward_bytes: float
    backward_bytes: float
    forward_seconds: float
    backward_seconds: float


class ClusterEstimate(_Document):
    """One cluster. The time of a round is `num_steps` times `step_seconds`, plus the seconds of push and fetch."""

    hosts: tuple[HostEstimate, ...]
    links: tuple[LinkEstimate, ...]
    num_micro_batches: int
    num_slices: int
    """Slices of a micro-batch. 1 means whole rows."""
    num_steps: int
    bottleneck: str
    """As in `ClusterPrediction`."""
    limit: str
    """The bottleneck in words."""
    step_seconds: float
    push_seconds: float
    fetch_seconds: float
    first_fetch_seconds: float
    """Seconds of the first fetch, of the initial weights."""
    round_seconds: float


class Change(_Document):
    """A change with which the model fits."""

    settings: tuple[str, ...] = ()
    """Settings of the job, as `--set` takes them."""
    boxes: str = ""
    """What the boxes would have to be."""


class Estimate(_Document):
    """The answer to a request."""

    fits: bool
    strategy: str
    missing: tuple[str, ...] = ()
    """What is missing, if the model does not fit. The clusters then show segments in proportion to speed, without limits of
    memory."""
    clusters: tuple[ClusterEstimate, ...]
    changes: tuple[Change, ...] = ()
    """Changes that each make the model fit, the smallest first."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """Those that training gives before its first round."""
