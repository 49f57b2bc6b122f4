"""What a round decides about: hosts, links, a model and its budgets. Everything here is immutable and plain data.

Units of design/dssra.md, 1: seconds, bytes, bit/s, Hz, W, J. A link is named by its two hosts, sender first.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from collapipe.codecs import CodecName
from collapipe.radio_rate import radio_rate_bps


@dataclass(frozen=True)
class Host:
    """A host that may run units.

    Args:
        host_id: Identity.
        seconds_per_sample: One block's work for one sample, forward and backward: a_k.
        seconds_per_micro_batch: What a micro-batch costs whatever its size: o_k.
        memory_bytes: What it may use; `None` is no limit.
        base_bytes: What it uses before it holds any unit.
        busy_watts: What it draws beyond idle while it computes: design (8).
        energy_budget_joules: Of a round, in the long run; `None` is mains.
        backlog: Of its virtual queue: design (12).
        max_transmit_watts: Of its radio.
        weights_bps: Rate at which unit states reach or leave it; infinite where that time does not count.
    """

    host_id: str
    seconds_per_sample: float
    seconds_per_micro_batch: float = 0.0
    memory_bytes: int | None = None
    base_bytes: int = 0
    busy_watts: float = 0.0
    energy_budget_joules: float | None = None
    backlog: float = 0.0
    max_transmit_watts: float = 0.0
    weights_bps: float = math.inf

    def compute_seconds(self, micro_batch_size: float, work: float) -> float:
        """Seconds of one micro-batch, forward and backward: design (2). `work` is in blocks; none takes no time."""
        if not work:
            return 0.0
        return self.seconds_per_micro_batch + micro_batch_size * self.seconds_per_sample * work

    @property
    def joule_weight(self) -> float:
        """What a joule of it costs in design (13): Q_k / Ebar_k."""
        return self.backlog / self.energy_budget_joules if self.energy_budget_joules else 0.0


@dataclass(frozen=True)
class WiredLink:
    """One direction of a wired link, or of one that was measured: full duplex.

    Args:
        capacity_bps: The most that it carries.
        round_trip_seconds: There and back.
    """

    capacity_bps: float
    round_trip_seconds: float = 0.0

    def rate_bps(self, share: float, watts: float) -> float:
        """Rate with a share in bit/s; power is no matter here."""
        return min(share, self.capacity_bps)


@dataclass(frozen=True)
class RadioLink:
    """One direction of a radio link: design (1). Both directions of a link use its band in turn (half duplex).

    Args:
        gain: Power gain h.
        noise_watts_per_hertz: N0 + I0 at the receiver.
        round_trip_seconds: There and back.
        efficiency: Measured rate over that of the formula.
    """

    gain: float
    noise_watts_per_hertz: float
    round_trip_seconds: float = 0.0
    efficiency: float = 1.0

    def rate_bps(self, share: float, watts: float) -> float:
        """Rate with a share in Hz and a transmit power in W: design (1)."""
        return radio_rate_bps(share, watts, self.gain, self.noise_watts_per_hertz, self.efficiency)


Link = WiredLink | RadioLink


@dataclass(frozen=True)
class Segment:
    """A range of blocks, half-open."""

    start_block: int
    stop_block: int

    @property
    def num_blocks(self) -> int:
        """Blocks in it."""
        return self.stop_block - self.start_block


@dataclass(frozen=True)
class StagePlan:
    """Who runs which units: 0 is the embedding, 1 to L the blocks, L + 1 the head; half-open.

    Args:
        host_id: The host.
        start_unit: First unit.
        stop_unit: One past the last; equal to the first for a stage that only passes on.
        in_flight: Forward micro-batches that it may hold: w_k.
    """

    host_id: str
    start_unit: int
    stop_unit: int
    in_flight: int


@dataclass(frozen=True)
class LinkPlan:
    """What the link between two neighbouring stages is given, both directions.

    Args:
        codec: How activations and gradients are encoded.
        share: Of the channel, in bit/s on a wire and Hz on a radio; infinite where nothing is shared.
        forward_watts: Transmit power of the stage that sends activations; 0 on a wire.
        backward_watts: Transmit power of the stage that sends gradients.
    """

    codec: CodecName = "fp32"
    share: float = math.inf
    forward_watts: float = 0.0
    backward_watts: float = 0.0


@dataclass(frozen=True)
class ClusterPlan:
    """A decision for one cluster; link i leads from stage i to stage i + 1."""

    stages: tuple[StagePlan, ...]
    num_micro_batches: int
    links: tuple[LinkPlan, ...]

    @property
    def segments(self) -> dict[str, Segment]:
        """The blocks of every host that runs some, in pipeline order; units that are no blocks do not count."""
        last_block = max(stage.stop_unit for stage in self.stages) - 2
        held = {
            stage.host_id: Segment(
                max(stage.start_unit - 1, 0), min(stage.stop_unit - 1, last_block)
            )
            for stage in self.stages
        }
        return {host: segment for host, segment in held.items() if segment.num_blocks > 0}


RoundPlan = tuple[ClusterPlan, ...]
"""One decision a cluster, in cluster order."""


@dataclass(frozen=True)
class ModelCost:
    """What the units of a model cost. Work is counted in blocks.

    Args:
        num_blocks: L.
        block_state_bytes: Weights, gradients and optimizer state of a block.
        block_stash_bytes: Kept by a block of one sample for its backward pass.
        activation_bytes: What one sample puts on a link in fp32.
        embedding_work, head_work: Work of these units, in blocks.
        embedding_state_bytes, head_state_bytes: As for a block.
        embedding_stash_bytes, head_stash_bytes: As for a block.
        recompute: Whether a stage keeps only its input, and runs forward again for the backward pass.
    """

    num_blocks: int
    block_state_bytes: float = 0.0
    block_stash_bytes: float = 0.0
    activation_bytes: float = 0.0
    embedding_work: float = 0.0
    head_work: float = 0.0
    embedding_state_bytes: float = 0.0
    head_state_bytes: float = 0.0
    embedding_stash_bytes: float = 0.0
    head_stash_bytes: float = 0.0
    recompute: bool = False

    def work(self, start_unit: int, stop_unit: int) -> float:
        """Work of a range of units, in blocks."""
        return self._sum(start_unit, stop_unit, self.embedding_work, 1.0, self.head_work)

    def state_bytes(self, start_unit: int, stop_unit: int) -> float:
        """Weights, gradients and optimizer state of a range of units."""
        return self._sum(
            start_unit,
            stop_unit,
            self.embedding_state_bytes,
            self.block_state_bytes,
            self.head_state_bytes,
        )

    def memory_bytes(
        self, start_unit: int, stop_unit: int, in_flight: int, micro_batch_size: float
    ) -> float:
        """What a stage needs with a full window: design (10), without the host's base.

        Queues hold an activation that waits and a gradient that leaves for each micro-batch of the window.
        """
        stash = self._sum(
            start_unit,
            stop_unit,
            self.embedding_stash_bytes,
            self.block_stash_bytes,
            self.head_stash_bytes,
        )
        kept = in_flight * self.activation_bytes + stash if self.recompute else in_flight * stash
        queues = 2 * in_flight * self.activation_bytes
        return self.state_bytes(start_unit, stop_unit) + micro_batch_size * (kept + queues)

    def _sum(
        self, start_unit: int, stop_unit: int, embedding: float, block: float, head: float
    ) -> float:
        last = self.num_blocks + 1
        blocks = max(0, min(stop_unit, last) - max(start_unit, 1))
        return (
            blocks * block
            + (embedding if start_unit == 0 < stop_unit else 0.0)
            + (head if start_unit <= last < stop_unit else 0.0)
        )


@dataclass(frozen=True)
class ClusterProblem:
    """One cluster in one round.

    Args:
        control_unit: Runs the embedding.
        devices: May run segments; in registration order.
        edge_server: Runs the head, for every cluster.
        links: By (sender, receiver). A pair that is not there cannot be neighbours.
        micro_batch_options: Values that M may take, ascending: divisors of the mini-batch.
        channel: Name of the channel that its links share; `None` when they do not share.
        previous: The plan in force; `None` in the first round.
        step_seconds: Clipping barrier and optimizer, a step: T_step of design (5).
        upload_seconds: From the control unit to the edge server: 8 D_par / r of design (6).
        weight: Share of the training samples: w_n of design (11).
        loss_probability: That its update does not arrive: q_n of design (11).
    """

    control_unit: Host
    devices: tuple[Host, ...]
    edge_server: Host
    links: Mapping[tuple[str, str], Link]
    micro_batch_options: tuple[int, ...]
    channel: str | None = None
    previous: ClusterPlan | None = None
    step_seconds: float = 0.0
    upload_seconds: float = 0.0
    weight: float = 1.0
    loss_probability: float = 0.0

    @property
    def hosts(self) -> dict[str, Host]:
        """Every host by its identity."""
        return {host.host_id: host for host in (self.control_unit, *self.devices, self.edge_server)}


@dataclass(frozen=True)
class Convergence:
    """Constants of the convergence term Phi: design (11).

    Args:
        constants: c0 to c4.
        weight: lambda of design (13).
        limit: Phi_max; infinite for none.
        num_rounds: R.
    """

    constants: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    weight: float = 0.0
    limit: float = math.inf
    num_rounds: int = 1


@dataclass(frozen=True)
class RoundProblem:
    """Everything that a round's decision depends on: design (13).

    Args:
        clusters: In cluster order.
        model: What its units cost.
        mini_batch: Samples of a mini-batch.
        local_steps: Mini-batches of a round: H_loc.
        channels: What the links of each channel share: bit/s a direction on wires, Hz on radios.
        codecs: Encodings that a link may be given; the first is the default.
        in_flight_limit: Largest window; `None` for as large as memory allows.
        update_per_micro_batch: Whether every micro-batch is flushed and steps: end of design, 2.
        convergence: Of the job.
        penalty_weight: V.
        reference_seconds: tau_ref.
        migration_horizon_rounds: Rounds over which a move is enjoyed.
        fixed_seconds: Aggregation and broadcast: T_aggregate + T_broadcast of design (6).
        round_index: The round; `manual` placements depend on it.
    """

    clusters: tuple[ClusterProblem, ...]
    model: ModelCost
    mini_batch: int
    local_steps: int = 1
    channels: Mapping[str, float] = field(default_factory=dict)
    codecs: Sequence[CodecName] = ("fp32",)
    in_flight_limit: int | None = None
    update_per_micro_batch: bool = False
    convergence: Convergence = Convergence()
    penalty_weight: float = 1.0
    reference_seconds: float = 1.0
    migration_horizon_rounds: float = 10.0
    fixed_seconds: float = 0.0
    round_index: int = 0
