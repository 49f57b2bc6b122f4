"""Scenarios: what is simulated, as a TOML file says it."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from typing_extensions import Self

from collapipe.codecs import CodecName
from collapipe.emulation.device_profiles import DEVICE_PROFILES
from collapipe.errors import InvalidInputError
from collapipe.job import explain_mistakes
from collapipe.simulation.models import TRANSFORMERS

StrategyName = Literal["dssra", "pipeline", "titanic", "vanilla_fl", "centralized", "proportional"]
SweepParameter = Literal[
    "penalty_weight", "devices_per_cluster", "bandwidth", "heterogeneity", "energy_budget_joules"
]


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class HardwareConfig(_Section):
    """What a host can do: by profile, and what is given here in its place."""

    profile: str | None = None
    """Name of a device profile, for example `raspberry-pi-5`."""
    gigaflops: float | None = Field(default=None, gt=0)
    """Sustained 10^9 operations a second in training."""
    memory_gb: float | None = Field(default=None, gt=0)
    """Memory for training, in 10^9 bytes. Without it and a profile: no limit."""
    micro_batch_overhead_seconds: float | None = Field(default=None, ge=0)
    """What a micro-batch costs whatever its size."""
    busy_watts: float | None = Field(default=None, ge=0)
    """Power beyond idle while it computes."""
    transmit_watts: float = Field(default=0.1, gt=0)
    """Most that its radio sends with."""
    energy_budget_joules: float | None = Field(default=None, gt=0)
    """Of a round, in the long run. Not set: mains."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.profile is not None and self.profile not in DEVICE_PROFILES:
            raise ValueError(
                f"there is no device profile {self.profile!r}: use one of {', '.join(DEVICE_PROFILES)}"
            )
        if self.profile is None and self.gigaflops is None:
            raise ValueError("a host needs a profile, or gigaflops")
        return self


class DeviceConfig(HardwareConfig):
    """Some devices of one kind."""

    count: int = Field(default=1, ge=1)


class ClusterConfig(_Section):
    """Some clusters of one kind."""

    count: int = Field(default=1, ge=1)
    devices: list[DeviceConfig] = Field(min_length=1)
    """In registration order, unless `world.shuffle_devices`."""


class ScenarioModel(_Section):
    """What is trained."""

    name: str = "bert-base"
    sequence_length: int = Field(default=128, ge=1)
    """Tokens of a sample."""
    recompute: bool = False
    """Keep only the input of a segment and run its forward pass again."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in TRANSFORMERS:
            raise ValueError(f"there is no model {name!r}: use one of {', '.join(TRANSFORMERS)}")
        return name


class ScenarioTraining(_Section):
    """How a round goes."""

    mini_batch: int = Field(default=32, ge=1)
    local_steps: int = Field(default=10, ge=1)
    micro_batches: list[int] | None = Field(default=None, min_length=1)
    """Values that M may take. Not set: every divisor of the mini-batch."""
    update_per: Literal["mini_batch", "micro_batch"] = "mini_batch"
    in_flight_limit: int | None = Field(default=None, ge=1)
    codecs: list[CodecName] = Field(default=["fp32"], min_length=1)
    """The first for all strategies but `dssra`, which chooses."""
    step_seconds: float = Field(default=0.0, ge=0)
    """Clipping barrier and optimizer, a step."""
    simulated_steps: int = Field(default=1, ge=1)
    """Mini-batches of a round that are simulated; the others are taken to be like them."""
    base_memory_gb: float = Field(default=0.3, ge=0)
    """What a host uses before it holds any unit, in 10^9 bytes."""

    @model_validator(mode="after")
    def _divisors(self) -> Self:
        wrong = [m for m in self.micro_batches or () if m < 1 or self.mini_batch % m]
        if wrong:
            raise ValueError(
                f"training.micro_batches has {wrong}, which do not divide the mini-batch of {self.mini_batch}: use "
                f"some of {_divisors(self.mini_batch)}"
            )
        return self

    @property
    def micro_batch_options(self) -> tuple[int, ...]:
        """Values that M may take, ascending."""
        return tuple(sorted(set(self.micro_batches or _divisors(self.mini_batch))))


class ScenarioSchedule(_Section):
    """How the scheduler decides, and what it knows."""

    penalty_weight: float = Field(default=100.0, gt=0)
    """V of design (13)."""
    convergence_weight: float = Field(default=0.0, ge=0)
    convergence_constants: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    max_convergence_term: float | None = Field(default=None, gt=0)
    migration_horizon_rounds: float = Field(default=10.0, gt=0)
    hysteresis: float = Field(default=0.05, ge=0)
    """Share of the objective that a new plan has to save to replace the one in force."""
    telemetry_noise: float = Field(default=0.0, ge=0, lt=1)
    """Standard deviation of what the scheduler knows of speeds and links, relative to the truth."""


class RadioConfig(_Section):
    """Every link is a radio link: design (1)."""

    kind: Literal["radio"]
    bandwidth_hz: float = Field(default=40e6, gt=0)
    """Of the channel that the links of a cluster share."""
    path_loss_exponent: float = Field(default=3.0, gt=0)
    reference_loss_db: float = Field(default=40.0)
    """At 1 m, antennas included: 40 dB at 2.4 GHz, 47 dB at 5 GHz."""
    fading: Literal["rayleigh", "none"] = "rayleigh"
    """Drawn anew every round."""
    fading_branches: int = Field(default=1, ge=1)
    """Independent ones that are averaged: 1 is plain Rayleigh fading."""
    noise_figure_db: float = Field(default=7.0, ge=0)
    temperature_kelvin: float = Field(default=290.0, gt=0)
    interference: Literal["none", "density", "clusters"] = "none"
    """`density`: as given. `clusters`: all reuse the same band, and hear each other by what they send this round."""
    interference_watts_per_hertz: float = Field(default=0.0, ge=0)
    """For `density`."""
    duty: float = Field(default=0.5, gt=0, le=1)
    """For `clusters`: share of the time in which a transmitter sends; each direction half of it, by default."""
    cluster_radius_m: float = Field(default=20.0, gt=0)
    """Devices are in a disc around their control unit."""
    area_radius_m: float = Field(default=60.0, ge=0)
    """Control units are in a disc around the edge server."""
    round_trip_seconds: float = Field(default=0.004, ge=0)


class WireConfig(_Section):
    """Every link is a wire."""

    kind: Literal["wire"]
    rate_bps: float = Field(default=100e6, gt=0)
    """Capacity of a link, each direction."""
    shared_rate_bps: float | None = Field(default=None, gt=0)
    """What the links of a cluster share, each direction. Not set: nothing."""
    spread: float = Field(default=1.0, ge=1)
    """Links are up to so many times faster or slower, for good."""
    fluctuation: float = Field(default=0.0, ge=0, lt=1)
    """Standard deviation of the logarithm of a link's rate, drawn anew every round."""
    round_trip_seconds: float = Field(default=0.001, ge=0)


class WorldConfig(_Section):
    """What is neither host nor channel."""

    speed_spread: float = Field(default=1.0, ge=1)
    """Devices are up to so many times faster or slower than they are said to be; a cluster's mean stays."""
    speed_fluctuation: float = Field(default=0.0, ge=0, lt=1)
    """Standard deviation of the logarithm of a device's speed, drawn anew every round."""
    shuffle_devices: bool = True
    """Devices register in random order."""
    weights_bps: float | None = Field(default=None, gt=0)
    """Rate at which unit states reach or leave a device. Not set: that takes no time."""
    upload_bps: float | None = Field(default=None, gt=0)
    """Rate at which a control unit uploads its parameters. Not set: that takes no time."""


class SweepConfig(_Section):
    """One parameter that takes several values."""

    parameter: SweepParameter
    """`devices_per_cluster` takes the first so many devices of a cluster's list, repeated where it is too short;
    `heterogeneity` is `world.speed_spread`; `bandwidth` that of the radio, or the rate of the wire."""
    values: list[float] = Field(min_length=1)


class Scenario(_Section):
    """Everything that a scenario file says."""

    name: str = Field(default="scenario", pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    seeds: int | list[int] = 1
    """How many worlds, or their seeds."""
    rounds: int = Field(default=20, ge=1)
    strategies: list[StrategyName] = Field(default=["dssra", "pipeline"], min_length=1)
    model: ScenarioModel = ScenarioModel()
    training: ScenarioTraining = ScenarioTraining()
    schedule: ScenarioSchedule = ScenarioSchedule()
    channel: Annotated[RadioConfig | WireConfig, Field(discriminator="kind")]
    world: WorldConfig = WorldConfig()
    control_unit: HardwareConfig = HardwareConfig(profile="laptop")
    edge_server: HardwareConfig = HardwareConfig(gigaflops=2000.0)
    clusters: list[ClusterConfig] = Field(min_length=1)
    sweep: SweepConfig | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.seed_list:
            raise ValueError(f"seeds is {self.seeds}: at least 1 world is needed")
        if min(self.seed_list) < 0:
            raise ValueError(f"seeds is {self.seeds}: a seed is at least 0")
        for value in self.sweep.values if self.sweep else ():
            try:
                self.at(value)
            except ValidationError as error:
                reason = error.errors()[0]["msg"]
                raise ValueError(
                    f"sweep.values has {value:g}, which {self.sweep.parameter} cannot be: {reason}"  # type: ignore[union-attr]
                ) from None
        return self

    @property
    def seed_list(self) -> list[int]:
        """Every seed."""
        return list(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds

    def points(self) -> list[tuple[float | None, "Scenario"]]:
        """Scenarios without a sweep, each with the value that its parameter takes; one with `None` where nothing sweeps."""
        if self.sweep is None:
            return [(None, self)]
        return [(value, self.at(value)) for value in self.sweep.values]

    def at(self, value: float) -> "Scenario":
        """This scenario with the swept parameter at a value; raises pydantic's `ValidationError`."""
        document = self.model_dump(exclude={"sweep"})
        assert self.sweep is not None
        match self.sweep.parameter:
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
                    cluster["devices"] = _repeated(cluster["devices"], value)
        return Scenario.model_validate(document)


def read_scenario(document: dict[str, Any], origin: str) -> Scenario:
    """Validates a parsed scenario file; `origin` names it in errors.

    Raises:
        InvalidInputError: A key is unknown or missing, or a value is wrong; one line a mistake.
    """
    try:
        return Scenario.model_validate(document)
    except ValidationError as error:
        raise InvalidInputError(explain_mistakes(error, origin, Scenario)) from None


def _repeated(devices: list[dict[str, Any]], count: float) -> list[dict[str, Any]]:
    kinds = [{**device, "count": 1} for device in devices for _ in range(device["count"])]
    if count != int(count):
        raise ValueError(f"{count:g} is no number of devices")
    return [kinds[i % len(kinds)] for i in range(int(count))]


def _divisors(number: int) -> list[int]:
    return [m for m in range(1, number + 1) if number % m == 0]
