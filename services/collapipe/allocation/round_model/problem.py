"""The problem of a round (hosts, links, model, limits) and the plan that answers it, as immutable data.

Quantities are in seconds, bytes, bit/s, Hz, W and J. Symbols such as a_k and numbers in brackets such as (13)
are those of docs/scheduling.md. A pair of host ids names a link, the sender first.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from collapipe.codec_table import CodecName, UploadCodecName
from collapipe.radio_rate import radio_rate_bps
from collapipe.work_shares import FORWARD_SHARE, FROZEN_FORWARD_SHARE

RECOMPUTED_WORK = 1 + FORWARD_SHARE
"""Work of a stage that recomputes, divided by that of one that does not: (2)."""


@dataclass(frozen=True)
class Host:
    """A host that may run units.

    Args:
        seconds_per_sample: Time of one block for one sample, forward and backward: a_k.
        seconds_per_micro_batch: Time that every micro-batch takes, whatever its size: o_k.
        end_unit_work: Work of the embedding or the head, or of both, when this host runs it, in its blocks:
            omega_k. `None` means that of the model.
        deferred_share: Share of its compute time, without recomputation, that it leaves for later, when it has sent the
            gradient of its stage's input: d_k / c_k of (4). 0 if it does not split its backward pass.
        memory_bytes: Memory that training may use. `None` means no limit.
        base_bytes: Memory in use before the host holds any unit.
        busy_watts: Power while computing, beyond the power of an idle host: (8).
        idle_watts: Power that its budget pays for during the whole round, whether it takes part or not: (8).
        energy_budget_joules: Budget of an average round. `None` means mains power, without a budget.
        backlog: Backlog of its virtual queue: (12).
        push_bps, fetch_bps: Rates of weights to the edge server and from there, for the sum of (6): see
            `exchange_bps`. Infinity means that transfers take no time. A plan with `uploads` replaces `push_bps`.
        push_watts: Transmit power while it pushes with `push_bps`: (9).
    """

    host_id: str
    seconds_per_sample: float
    seconds_per_micro_batch: float = 0.0
    end_unit_work: float | None = None
    deferred_share: float = 0.0
    memory_bytes: int | None = None
    base_bytes: int = 0
    busy_watts: float = 0.0
    energy_budget_joules: float | None = None
    backlog: float = 0.0
    max_transmit_watts: float = 0.0
    push_bps: float = math.inf
    fetch_bps: float = math.inf
    push_watts: float = 0.0
    idle_watts: float = 0.0

    def compute_seconds(
        self, micro_batch_size: float, work: float, *, recompute: bool = False
    ) -> float:
        """Returns the time of one micro-batch, forward and backward: (2).

        `work` is counted in blocks. Without work even the fixed time is 0.
        """
        if not work:
            return 0.0
        factor = RECOMPUTED_WORK if recompute else 1.0
        seconds = factor * (micro_batch_size * self.seconds_per_sample * work)
        return self.seconds_per_micro_batch + seconds

    @property
    def joule_weight(self) -> float:
        """The price of a joule of this host in (13): Q_k / Ebar_k."""
        return self.backlog / self.energy_budget_joules if self.energy_budget_joules else 0.0


@dataclass(frozen=True)
class WiredLink:
    """One direction of a full-duplex link of a known rate: a wire, or any link whose rate was measured."""

    capacity_bps: float
    round_trip_seconds: float = 0.0

    def rate_bps(self, share: float, watts: float) -> float:
        """Returns the rate for a share in bit/s. Wires ignore the transmit power."""
        return min(share, self.capacity_bps)


@dataclass(frozen=True)
class RadioLink:
    """One direction of a radio link. Both directions take turns on the same band (half duplex).

    Args:
        gain: Power gain h from the sender to the receiver.
        noise_watts_per_hertz: Density of noise and interference at the receiver, N0 + I0.
        efficiency: Measured rate divided by the rate of (1).
        most_bits_per_hertz: What the highest modulation carries: mu of (1).
    """

    gain: float
    noise_watts_per_hertz: float
    round_trip_seconds: float = 0.0
    efficiency: float = 1.0
    most_bits_per_hertz: float = math.inf

    def rate_bps(self, share: float, watts: float) -> float:
        """Returns the rate for a share in Hz and a transmit power: (1)."""
        return radio_rate_bps(
            share,
            watts,
            self.gain,
            self.noise_watts_per_hertz,
            self.efficiency,
            self.most_bits_per_hertz,
        )

    def useful_watts(self, share: float) -> float:
        """Returns the power that the highest modulation needs. A higher one gives the same rate."""
        if math.isinf(self.most_bits_per_hertz) or not self.gain:
            return math.inf
        return (2**self.most_bits_per_hertz - 1) * share * self.noise_watts_per_hertz / self.gain


Link = WiredLink | RadioLink


def exchange_bps(link: Link, sender: Host, overlap: float, channel: float) -> float:
    """Returns the rate with which weights on a link count in (6), if several hosts of a cluster send at once.

    (6) adds the times of the hosts, as if they took turns. This is true on a radio channel. Transfers on
    separate wires overlap, so each wire counts with its rate times the overlap.

    Args:
        overlap: Mean number of hosts that send at once; see `push_overlap`.
        channel: Capacity of the channel that the links share. Infinity if they share none.
    """
    if isinstance(link, RadioLink):
        return link.rate_bps(channel, sender.max_transmit_watts)
    return min(overlap * link.capacity_bps, channel)


@dataclass(frozen=True)
class Segment:
    """A half-open range of blocks."""

    start_block: int
    stop_block: int

    @property
    def num_blocks(self) -> int:
        return self.stop_block - self.start_block


@dataclass(frozen=True)
class StagePlan:
    """One stage: a host and its half-open range of units.

    Unit 0 is the embedding, units 1 to L are the blocks, and unit L + 1 is the head. A stage that runs no
    unit and only forwards token ids has an empty range. `in_flight` is the window w_k. A stage with `recompute` keeps
    only its input, and repeats its forward pass before its backward pass.
    """

    host_id: str
    start_unit: int
    stop_unit: int
    in_flight: int
    recompute: bool = False


@dataclass(frozen=True)
class LinkPlan:
    """The settings of the link between two neighbouring stages, for both directions.

    Args:
        codec: Encoding of activations and of their gradients.
        share: Share of the channel, in bit/s on a wire and in Hz on a radio. Infinite if links share no
            channel.
        forward_watts: Transmit power of the stage that sends activations. 0 on a wire.
        backward_watts: Transmit power of the stage that sends activation gradients. 0 on a wire.
    """

    codec: CodecName = "fp32"
    share: float = math.inf
    forward_watts: float = 0.0
    backward_watts: float = 0.0


@dataclass(frozen=True)
class UploadPlan:
    """How a host sends its new weights to the edge server over a radio, while the others of its cluster send.

    Args:
        share: Share of the channel in Hz. 0 if the host sends none.
        watts: Transmit power.
    """

    share: float = 0.0
    watts: float = 0.0


@dataclass(frozen=True)
class ClusterPlan:
    """The plan of one cluster. Link i leads from stage i to stage i + 1.

    The rows of a micro-batch are cut into `num_slices` slices. `uploads` has an entry for each stage. It is empty if nothing is decided: the hosts then push with `push_bps`.
    """

    stages: tuple[StagePlan, ...]
    num_micro_batches: int
    links: tuple[LinkPlan, ...]
    upload_codec: UploadCodecName = "fp32"
    uploads: tuple[UploadPlan, ...] = ()
    num_slices: int = 1

    @property
    def num_parts(self) -> int:
        """The number of parts of a mini-batch that follow each other through the pipeline: M sigma."""
        return self.num_micro_batches * self.num_slices

    @property
    def takes_turns(self) -> bool:
        """Whether a link carries all activations before all gradients: those of the slices of one micro-batch."""
        return self.num_micro_batches == 1 < self.num_slices

    @property
    def segments(self) -> dict[str, Segment]:
        """The segment of every host that runs blocks, in pipeline order."""
        last_block = max(stage.stop_unit for stage in self.stages) - 2
        held = {
            stage.host_id: Segment(
                max(stage.start_unit - 1, 0), min(stage.stop_unit - 1, last_block)
            )
            for stage in self.stages
        }
        return {host: segment for host, segment in held.items() if segment.num_blocks > 0}


RoundPlan = tuple[ClusterPlan, ...]
"""The plans of a round, in the order of the clusters."""


@dataclass(frozen=True)
class BlockShare:
    """The work, state and stash of a block, divided by those of the mean block."""

    work: float = 1.0
    state: float = 1.0
    stash: float = 1.0
    frozen: float = 1.0


@dataclass(frozen=True)
class ModelCost:
    """Work, memory and traffic of the units of a model.

    Work is counted in mean blocks. A state has 4 values for each trained weight: the weight, its gradient and the two
    moments of Adam. A stash is the memory that a unit keeps of one sample for its backward pass.

    Args:
        block_state_bytes, block_stash_bytes: Those of the mean block.
        embedding_frozen_bytes, block_frozen_bytes, head_frozen_bytes: The weights of the embedding, the mean block and
            the head that are not trained, as with LoRA.
        frozen_memory_share: Memory of a block's frozen weights, divided by their size: less than 1 if hosts quantise
            them.
        activation_bytes: Bytes of one sample on a link, without a lossy codec.
        pattern: The blocks repeat it from the first one on. The means of its shares are 1. Half blocks
            alternate between attention and feed-forward networks.
        first_trained_unit: Units before it compute no gradients, and no link leads gradients to them.
        lossy_uploads: Whether uploads may be lossy. Then a unit keeps 2 more values for each weight: the weight
            before the round, and what uploads have lost, which is a part of the optimizer state.
        keeps_base: Whether updates are private or masked. Then a unit keeps the weights before the round.
        keeps_moments: Whether a unit keeps the optimizer state of the last round while it trains.
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
    embedding_frozen_bytes: float = 0.0
    block_frozen_bytes: float = 0.0
    head_frozen_bytes: float = 0.0
    frozen_memory_share: float = 1.0
    first_trained_unit: int = 0
    lossy_uploads: bool = False
    keeps_base: bool = False
    keeps_moments: bool = False
    pattern: tuple[BlockShare, ...] = (BlockShare(),)

    @property
    def period(self) -> int:
        """The number of blocks after which costs repeat."""
        return len(self.pattern)

    def work(self, start_unit: int, stop_unit: int, end_unit_work: float | None = None) -> float:
        """Returns the work of units. `end_unit_work` replaces the work of the embedding and the head."""
        shares = [share.work for share in self.pattern]
        if end_unit_work is None:
            return self._sum(
                start_unit, stop_unit, self.embedding_work, 1.0, self.head_work, shares
            )
        has_end_unit = start_unit == 0 < stop_unit or start_unit <= self.num_blocks + 1 < stop_unit
        return (
            self._sum(start_unit, stop_unit, 0.0, 1.0, 0.0, shares) + has_end_unit * end_unit_work
        )

    def trained_work(
        self, start_unit: int, stop_unit: int, end_unit_work: float | None = None
    ) -> float:
        """Returns the work of units in training. Blocks before the first trained unit run forwards only."""
        work = self.work(start_unit, stop_unit, end_unit_work)
        first, stop = max(start_unit, 1), min(stop_unit, self.first_trained_unit)
        return work - (1 - FROZEN_FORWARD_SHARE) * self.work(first, max(first, stop))

    def state_bytes(self, start_unit: int, stop_unit: int) -> float:
        """Returns the memory of units without their stashes."""
        copies = 6 if self.lossy_uploads else 4 + self.keeps_base
        trained = copies * self.weights_bytes(start_unit, stop_unit)
        if self.keeps_moments:
            trained += self.optimizer_bytes(start_unit, stop_unit)
        return trained + self.frozen_memory_bytes(start_unit, stop_unit)

    def frozen_memory_bytes(self, start_unit: int, stop_unit: int) -> float:
        """Returns the memory of the weights that are not trained."""
        first, stop = max(start_unit, 1), min(stop_unit, self.num_blocks + 1)
        saved = (1 - self.frozen_memory_share) * self.frozen_bytes(first, max(first, stop))
        return self.frozen_bytes(start_unit, stop_unit) - saved

    def frozen_bytes(self, start_unit: int, stop_unit: int) -> float:
        """Returns the size of the files of the weights that are not trained."""
        return self._sum(
            start_unit,
            stop_unit,
            self.embedding_frozen_bytes,
            self.block_frozen_bytes,
            self.head_frozen_bytes,
            [share.frozen for share in self.pattern],
        )

    def weights_bytes(self, start_unit: int, stop_unit: int) -> float:
        """Returns the size of the trained weights."""
        return self._sum(
            start_unit,
            stop_unit,
            self.embedding_state_bytes / 4,
            self.block_state_bytes / 4,
            self.head_state_bytes / 4,
            [share.state for share in self.pattern],
        )

    def optimizer_bytes(self, start_unit: int, stop_unit: int) -> float:
        """Returns the size of the optimizer state."""
        return (3 if self.lossy_uploads else 2) * self.weights_bytes(start_unit, stop_unit)

    def stash_bytes(self, start_unit: int, stop_unit: int) -> float:
        """Returns what units keep of one sample for its backward pass."""
        return self._sum(
            start_unit,
            stop_unit,
            self.embedding_stash_bytes,
            self.block_stash_bytes,
            self.head_stash_bytes,
            [share.stash for share in self.pattern],
        )

    def slice_bytes(self, start_unit: int, stop_unit: int, num_slices: int) -> float:
        """Returns the most that the slices of one sample keep beyond its stash: eta of (10).

        Each slice keeps the keys and values of the slices before it. Each but the last also keeps its own once more, and
        their gradients. Keys and values together have the size of two activations in each layer, or less. The first
        half of a layer has them all.
        """
        first, last = max(start_unit, 1) - 1, min(stop_unit, self.num_blocks + 1) - 1
        num_attentions = max(0, -(-last // self.period) - -(-first // self.period))
        per_layer = 2 * self.activation_bytes * (num_slices - 1) * (1 / 2 + 2 / num_slices)
        return num_attentions * per_layer

    def memory_bytes(
        self,
        start_unit: int,
        stop_unit: int,
        in_flight: int,
        micro_batch_size: float,
        *,
        num_slices: int = 1,
        recompute: bool = False,
    ) -> float:
        """Returns the memory of a stage with a full window: (10) without the base.

        For each micro-batch of the window, the queues hold one waiting activation and one outgoing gradient.
        """
        stash = self.stash_bytes(start_unit, stop_unit)
        stash += self.slice_bytes(start_unit, stop_unit, num_slices)
        kept = in_flight * self.activation_bytes + stash if recompute else in_flight * stash
        queues = 2 * in_flight * self.activation_bytes
        return self.state_bytes(start_unit, stop_unit) + micro_batch_size * (kept + queues)

    def _sum(
        self,
        start_unit: int,
        stop_unit: int,
        embedding: float,
        block: float,
        head: float,
        shares: Sequence[float],
    ) -> float:
        last, first = self.num_blocks + 1, max(start_unit, 1)
        repeats, rest = divmod(max(0, min(stop_unit, last) - first), self.period)
        blocks = repeats * sum(shares)
        blocks += sum(shares[(first - 1 + i) % self.period] for i in range(rest))
        return (
            blocks * block
            + (embedding if start_unit == 0 < stop_unit else 0.0)
            + (head if start_unit <= last < stop_unit else 0.0)
        )


def push_overlap(
    model: ModelCost, links: Mapping[tuple[str, str], Link], edge_server_id: str, plan: ClusterPlan
) -> float:
    """Returns how many hosts push at once on average, if each has its own wire to the edge server.

    This is 1 if one host has nearly all weights, and the number of hosts if all need equally long.
    """
    seconds = []
    for stage in plan.stages:
        link = links.get((stage.host_id, edge_server_id))
        if isinstance(link, WiredLink) and link.capacity_bps:
            num_bytes = model.weights_bytes(stage.start_unit, stage.stop_unit)
            seconds.append(8 * num_bytes / link.capacity_bps)
    return sum(seconds) / max(seconds) if any(seconds) else 1.0


@dataclass(frozen=True)
class ClusterProblem:
    """One cluster in one round.

    Args:
        devices: Hosts that may run segments, in registration order.
        edge_server: Runs the head. All clusters share this host.
        links: By (sender, receiver). Two hosts without a link cannot be neighbours in the pipeline.
        micro_batch_options: Values that M may take, ascending. Each divides the mini-batch.
        slice_options: Values that sigma may take. Every strategy but `dssra` uses the first.
        channel: Name of the channel that its links share. `None` if they share none.
        previous: The plan of the previous round. `None` in the first round.
        step_seconds: Time of gradient clipping and the optimizer in one step: T_step of (5).
        upload_codecs: Codecs that its uploads may use. Every strategy but `dssra` uses the first.
        weight: Share of the training samples: w_n of (11).
        loss_probability: Probability that its update does not arrive: q_n of (11).
    """

    control_unit: Host
    devices: tuple[Host, ...]
    edge_server: Host
    links: Mapping[tuple[str, str], Link]
    micro_batch_options: tuple[int, ...]
    channel: str | None = None
    previous: ClusterPlan | None = None
    step_seconds: float = 0.0
    upload_codecs: tuple[UploadCodecName, ...] = ("fp32",)
    slice_options: tuple[int, ...] = (1,)
    weight: float = 1.0
    loss_probability: float = 0.0

    @property
    def hosts(self) -> dict[str, Host]:
        """Every host by its id."""
        return {host.host_id: host for host in (self.control_unit, *self.devices, self.edge_server)}


@dataclass(frozen=True)
class Convergence:
    """The parameters of the convergence term Phi: (11).

    Args:
        constants: c0 to c4.
        weight: lambda of (13).
        limit: Phi_max. Infinity means no limit.
        num_rounds: R, the rounds of the whole job.
    """

    constants: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    weight: float = 0.0
    limit: float = math.inf
    num_rounds: int = 1


@dataclass(frozen=True)
class RoundProblem:
    """Everything that the decision of a round depends on: (13).

    Args:
        mini_batch: Number of samples.
        local_steps: Mini-batches of a round: H_loc.
        channels: Capacity of each channel: bit/s in each direction on wires, Hz on radios.
        codecs: Codecs that a link may use. Every strategy but `dssra` uses the first.
        in_flight_limit: Largest in-flight window. `None` means that only memory limits it.
        update_per_micro_batch: Whether each micro-batch passes the whole pipeline alone and ends with an
            optimizer step.
        penalty_weight: V of (13).
        reference_seconds: tau_ref of (13); see `collapipe.allocation.reference_seconds`.
        migration_horizon_rounds: Number of rounds over which the cost of moving units is spread.
        fixed_seconds: Time of every round beside training and transfers of weights: T_fixed of (6).
        round_index: Only the strategy `manual` depends on it.
        blocks_on_control_unit, blocks_on_edge_server: Where `dssra` may place blocks besides the devices. In the
            paper, only devices run blocks.
        recompute_options: What `StagePlan.recompute` may be. `dssra` decides for each device. The control unit uses
            the first option, and other strategies use one for all. A stage with the head never recomputes.
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
    blocks_on_control_unit: bool = False
    blocks_on_edge_server: bool = False
    recompute_options: tuple[bool, ...] = (False,)

    @property
    def hosts(self) -> dict[str, Host]:
        """Every host of every cluster by its id."""
        return {key: host for cluster in self.clusters for key, host in cluster.hosts.items()}

    @property
    def recomputes_by_default(self) -> bool:
        return self.recompute_options[0]

    @property
    def idle_price(self) -> float:
        """The price of a second of idle power in (13): sum of Q_k P_k / Ebar_k."""
        return sum(host.joule_weight * host.idle_watts for host in self.hosts.values())

    @property
    def previous(self) -> RoundPlan | None:
        """The plans of the previous round. `None` unless every cluster has one."""
        plans = tuple(c.previous for c in self.clusters if c.previous is not None)
        return plans if len(plans) == len(self.clusters) else None
