"""The schema of scenario files, the TOML files that `collapipe simulate` reads."""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator
from typing_extensions import Self

from collapipe.codec_table import CodecName, UploadCodecName
from collapipe.emulation.device_profiles import DEVICE_PROFILES
from collapipe.errors import InvalidInputError
from collapipe.job import DecisionParameters, Section, divisors
from collapipe.mistakes import explain_mistakes
from collapipe.simulation.transformer_costs import TransformerName

StrategyName = Literal[
    "dssra", "pipeline", "titanic", "titanic_best", "vanilla_fl", "centralized", "proportional"
]
SweepParameter = Literal[
    "penalty_weight",
    "clusters",
    "devices_per_cluster",
    "bandwidth",
    "heterogeneity",
    "energy_budget_joules",
]


class HardwareSection(Section):
    """The hardware of a host. A value that is given here replaces the value of the profile."""

    profile: str | None = None
    """Name of a device profile, for example `raspberry-pi-5`. Without it, `gigaflops` is required."""
    gigaflops: float | None = Field(default=None, gt=0)
    """Sustained speed in training, in 10^9 operations per second."""
    memory_gb: float | None = Field(default=None, gt=0)
    """Memory for training, in 10^9 bytes. Without it and without a profile there is no limit."""
    micro_batch_overhead_seconds: float | None = Field(default=None, ge=0)
    """Time that every micro-batch takes, whatever its size."""
    busy_watts: float | None = Field(default=None, ge=0)
    """Power while computing, beyond the power of an idle host."""
    idle_watts: float = Field(default=0.0, ge=0)
    """Power that the energy budget pays for during the whole round. A profile does not set it."""
    transmit_watts: float = Field(default=0.1, gt=0)
    """Largest transmit power of its radio."""
    energy_budget_joules: float | None = Field(default=None, gt=0)
    """Budget of an average round. Not set: mains power, without a budget."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.profile is not None and self.profile not in DEVICE_PROFILES:
            raise ValueError(
                f"there is no device profile {self.profile!r}: use one of {', '.join(DEVICE_PROFILES)}"
            )
        if self.profile is None and self.gigaflops is None:
            raise ValueError("a host needs a profile, or gigaflops")
        return self


class DeviceSection(HardwareSection):
    """Devices with the same hardware."""

    count: int = Field(default=1, ge=1)
    """Number of such devices."""
    battery_joules: float | None = Field(default=None, gt=0)
    """Capacity of its battery. Its energy budget is this capacity, divided by the rounds of the scenario. The
    round in which the battery becomes empty is its last one. Not set: mains power."""

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if self.battery_joules is not None and self.energy_budget_joules is not None:
            raise ValueError(
                f"a device has battery_joules = {self.battery_joules:g} and energy_budget_joules = "
                f"{self.energy_budget_joules:g}: give only one, because a battery sets the budget"
            )
        return self


class ClusterSection(Section):
    """Clusters with the same devices."""

    count: int = Field(default=1, ge=1)
    """Number of such clusters."""
    devices: list[DeviceSection] = Field(min_length=1)
    """Devices in registration order, unless `world.shuffle_devices` is set."""


class ModelSection(Section):
    """The model that is trained."""

    name: TransformerName = "bert-base"
    """A well-known Transformer."""
    sequence_length: int = Field(default=128, ge=1)
    """Tokens of a sample."""
    recompute: bool | Literal["auto"] = False
    """Whether a segment keeps only its input and repeats the forward pass before the backward pass. With `auto`, `dssra`
    decides for each device, and other strategies for all devices together."""
    split_backward: bool = False
    """Whether a segment sends the gradient of its input before it computes those of its weights."""
    half_blocks: bool = False
    """Whether plans cut each layer into two blocks, its attention and its feed-forward network."""


class TrainingSection(Section):
    """The training in a round."""

    mini_batch: int = Field(default=32, ge=1)
    """Samples of a mini-batch."""
    local_steps: int = Field(default=10, ge=1)
    """Mini-batches of a round."""
    micro_batches: list[int] | None = Field(default=None, min_length=1)
    """Allowed numbers of micro-batches. Not set: every divisor of the mini-batch."""
    update_per: Literal["mini_batch", "micro_batch"] = "mini_batch"
    """When the optimizer takes a step."""
    in_flight_limit: int | None = Field(default=None, ge=1)
    """Largest in-flight window of a stage. Not set: only memory limits it."""
    codecs: list[CodecName] = Field(default=["fp32"], min_length=1)
    """Codecs that `dssra` may choose from. All other strategies use the first."""
    upload_codecs: list[UploadCodecName] = Field(default=["fp32"], min_length=1)
    """Codecs of uploads that `dssra` may choose from. All other strategies use the first."""
    step_seconds: float = Field(default=0.0, ge=0)
    """Time of gradient clipping and the optimizer in one step."""
    simulated_steps: int = Field(default=1, ge=1)
    """Number of mini-batches of a round that are simulated. The others are assumed to take the same time."""
    base_memory_gb: float = Field(default=0.3, ge=0)
    """Memory in use before a host holds any unit, in 10^9 bytes."""

    @model_validator(mode="after")
    def _divide(self) -> Self:
        wrong = [m for m in self.micro_batches or () if m < 1 or self.mini_batch % m]
        if wrong:
            raise ValueError(
                f"training.micro_batches has {wrong}, which do not divide the mini-batch of {self.mini_batch}: use "
                f"some of {divisors(self.mini_batch)}"
            )
        return self

    @property
    def micro_batch_options(self) -> tuple[int, ...]:
        """Allowed numbers of micro-batches, ascending."""
        return tuple(sorted(set(self.micro_batches or divisors(self.mini_batch))))


class ScheduleSection(DecisionParameters):
    """The parameters of decisions, and the quality of the telemetry."""

    blocks_on_control_unit: bool = False
    """Whether `dssra` may place blocks on control units. In the paper, only devices run blocks."""
    blocks_on_edge_server: bool = False
    """Whether `dssra` may place blocks on the edge server."""
    telemetry_noise: float = Field(default=0.0, ge=0, lt=1)
    """Standard deviation of the logarithm of measured speeds and rates around their true values."""


class RadioSection(Section):
    """Radio links between all hosts."""

    kind: Literal["radio"]
    """Selects radio links."""
    bandwidth_hz: float = Field(default=40e6, gt=0)
    """Width of the channel that the links of a cluster share."""
    path_loss_exponent: float = Field(default=3.0, gt=0)
    """2 in free space, 3 to 4 through walls."""
    reference_loss_db: float = Field(default=40.0)
    """Loss at 1 m, antennas included: 40 dB at 2.4 GHz, 47 dB at 5 GHz."""
    fading: Literal["rayleigh", "none"] = "rayleigh"
    """Fading is drawn anew every round."""
    fading_branches: int = Field(default=1, ge=1)
    """Number of independent fading powers that are averaged. 1 is plain Rayleigh fading."""
    shadowing_db: float = Field(default=0.0, ge=0)
    """Standard deviation of the gain that walls and bodies take or leave, in dB. Drawn once for each link."""
    efficiency: float = Field(default=1.0, gt=0, le=1)
    """Share of the rate of docs/scheduling.md (1) that protocols leave: contention, headers, coding."""
    most_bits_per_hertz: float | None = Field(default=None, gt=0, le=20)
    """What the highest modulation carries: 6.7 for 256-QAM with code rate 5/6. Without it, rates have no such limit."""
    noise_figure_db: float = Field(default=7.0, ge=0)
    """Noise figure of a receiver."""
    temperature_kelvin: float = Field(default=290.0, gt=0)
    """Temperature of the thermal noise."""
    interference: Literal["none", "density", "clusters"] = "none"
    """`density`: a constant density. `clusters`: all clusters use the same band and disturb each other."""
    interference_watts_per_hertz: float = Field(default=0.0, ge=0)
    """Interference density for `density`."""
    duty: float = Field(default=0.5, gt=0, le=1)
    """Share of the time in which a transmitter is active, for `clusters`."""
    cluster_radius_m: float = Field(default=20.0, gt=0)
    """Radius of the disc around a control unit that contains its devices."""
    area_radius_m: float = Field(default=60.0, ge=0)
    """Radius of the disc around the edge server that contains the control units."""
    round_trip_seconds: float = Field(default=0.004, ge=0)
    """Round-trip time of a link."""


class WireSection(Section):
    """Wired links between all hosts."""

    kind: Literal["wire"]
    """Selects wired links."""
    rate_bps: float = Field(default=100e6, gt=0)
    """Rate of a link in each direction."""
    shared_rate_bps: float | None = Field(default=None, gt=0)
    """Rate that the links of a cluster share, in each direction. Not set: links share nothing."""
    spread: float = Field(default=1.0, ge=1)
    """Largest factor between the rate of a link and `rate_bps`, up or down. Drawn once."""
    fluctuation: float = Field(default=0.0, ge=0, lt=1)
    """Standard deviation of the logarithm of a link's rate. Drawn anew every round."""
    round_trip_seconds: float = Field(default=0.001, ge=0)
    """Round-trip time of a link."""


class WorldSection(Section):
    """How hosts vary."""

    speed_spread: float = Field(default=1.0, ge=1)
    """Largest factor between the speed of a device and its given speed, up or down. Drawn once; the mean
    speed of a cluster stays the same."""
    speed_fluctuation: float = Field(default=0.0, ge=0, lt=1)
    """Standard deviation of the logarithm of a host's speed. Drawn anew every round."""
    shuffle_devices: bool = True
    """Whether devices register in random order."""
    absence: float = Field(default=0.0, ge=0, lt=1)
    """Probability that a device is away in a round. Every strategy decides with the devices that are there. A
    cluster keeps at least one."""
    absence_rounds: float = Field(default=1.0, ge=1)
    """Mean length of an absence, in rounds. Absences and the time between them are geometric."""

    @model_validator(mode="after")
    def _can_leave(self) -> Self:
        if self.leaving > 1:
            raise ValueError(
                f"world.absence is {self.absence:g} with absence_rounds = {self.absence_rounds:g}: a device that is "
                f"there for at least 1 round is away at most {self.absence_rounds / (1 + self.absence_rounds):g} of "
                "the time; use a smaller absence or a larger absence_rounds"
            )
        return self

    @property
    def leaving(self) -> float:
        """Probability that a device that is there is away in the next round."""
        return self.absence / (1 - self.absence) / self.absence_rounds


class SweepSection(Section):
    """One parameter that takes several values. Every value is a scenario of its own."""

    parameter: SweepParameter
    """`heterogeneity` stands for `world.speed_spread`, and `bandwidth` for `bandwidth_hz` of a radio or
    `rate_bps` of a wire. `devices_per_cluster` takes as many devices from the start of a cluster's list, and
    repeats a list that is too short. `clusters` does the same with the list of clusters.
    `energy_budget_joules` is the budget of every device."""
    values: list[float] = Field(min_length=1)
    """Values of the parameter."""


class Scenario(Section):
    """The whole file."""

    name: str = Field(default="scenario", pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    """Name of the folder for the results."""
    seeds: int | list[int] = 1
    """Number of seeds, counted from 0, or a list of seeds. Each seed draws other hosts and links."""
    rounds: int = Field(default=20, ge=1)
    """Rounds of each strategy and seed."""
    strategies: list[StrategyName] = Field(
        default=["dssra", "proportional", "pipeline", "titanic_best"], min_length=1
    )
    """Strategies to compare."""
    model: ModelSection = ModelSection()
    training: TrainingSection = TrainingSection()
    schedule: ScheduleSection = ScheduleSection()
    channel: Annotated[RadioSection | WireSection, Field(discriminator="kind")]
    world: WorldSection = WorldSection()
    control_unit: HardwareSection = HardwareSection(profile="laptop")
    edge_server: HardwareSection = HardwareSection(gigaflops=2000.0)
    clusters: list[ClusterSection] = Field(min_length=1)
    sweep: SweepSection | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.seed_list:
            raise ValueError(f"seeds is {self.seeds}: at least 1 seed is needed")
        if min(self.seed_list) < 0:
            raise ValueError(f"seeds is {self.seeds}: a seed is at least 0")
        if self.sweep is not None:
            for value in self.sweep.values:
                try:
                    self._with_swept(self.sweep.parameter, value)
                except ValidationError as error:
                    reason = error.errors()[0]["msg"]
                    raise ValueError(
                        f"sweep.values has {value:g}, which {self.sweep.parameter} cannot be: {reason}"
                    ) from None
        return self

    @property
    def seed_list(self) -> list[int]:
        return list(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds

    def points(self) -> list[tuple[float | None, "Scenario"]]:
        """Returns scenarios without a sweep: one for each swept value, or this one with the value `None`."""
        if self.sweep is None:
            return [(None, self)]
        parameter = self.sweep.parameter
        return [(value, self._with_swept(parameter, value)) for value in self.sweep.values]

    def _with_swept(self, parameter: SweepParameter, value: float) -> "Scenario":
        """Returns this scenario without its sweep and with a value set. Raises pydantic's `ValidationError`."""
        document = self.model_dump(exclude={"sweep"})
        match parameter:
            case "penalty_weight":
                document["schedule"]["penalty_weight"] = value
            case "bandwidth":
                is_radio = self.channel.kind == "radio"
                document["channel"]["bandwidth_hz" if is_radio else "rate_bps"] = value
            case "heterogeneity":
                document["world"]["speed_spread"] = value
            case "energy_budget_joules":
                for cluster in document["clusters"]:
                    for device in cluster["devices"]:
                        device["energy_budget_joules"] = value
            case "devices_per_cluster":
                for cluster in document["clusters"]:
                    cluster["devices"] = _repeated(cluster["devices"], value, "devices")
            case "clusters":
                document["clusters"] = _repeated(document["clusters"], value, "clusters")
        return Scenario.model_validate(document)


def read_scenario(document: dict[str, Any], origin: str) -> Scenario:
    """Validates a parsed scenario file. `origin` names the document in error messages.

    Raises:
        InvalidInputError: A key is unknown or missing, or a value is wrong. The message has a line for each
            mistake.
    """
    try:
        return Scenario.model_validate(document)
    except ValidationError as error:
        raise InvalidInputError(explain_mistakes(error, origin, Scenario)) from None


def _repeated(sections: list[dict[str, Any]], count: float, noun: str) -> list[dict[str, Any]]:
    """Returns the first `count` devices or clusters of a list that starts over at its end."""
    if count != int(count):
        raise ValueError(f"{count:g} is not a whole number of {noun}: use one from 1 on")
    single = [{**section, "count": 1} for section in sections for _ in range(section["count"])]
    return [single[i % len(single)] for i in range(int(count))]
