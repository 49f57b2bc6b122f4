"""Runs a whole job in one process: trains each client in a plain loop, and averages them after every round.

It uses only the job file, the initial model and the rows of `collapipe`.
"""

import copy
import random
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from torch import Tensor
from transformers import BitsAndBytesConfig, PreTrainedModel

from collapipe.job import JobConfig
from collapipe.models import ModelAdapter, adapter_for, create_config_json, initial_model
from collapipe.tasks import Cursor, Task, begin_round, draw, load_task
from reference.centralized import MiniBatch, make_optimizer, train_cluster
from reference.fedavg import Contribution, average, fixed_point_average
from reference.private_updates import private_weights


@dataclass(frozen=True)
class Trained:
    """The result of a job."""

    weights: dict[str, Tensor]
    """The global model as `save_pretrained` would write it. Tied tensors have their first name."""
    optimizer_states: list[dict[str, Tensor]]
    """The optimizer state of each cluster, by "PARAMETER//ENTRY"."""
    losses: list[list[float]]
    """The losses of each cluster, one for each optimizer step."""


@dataclass
class Client:
    """The data, the model and the optimizer of one cluster."""

    job: JobConfig
    cluster_index: int
    task: Task
    model: PreTrainedModel
    adapter: ModelAdapter
    cursor: Cursor = field(default_factory=Cursor)
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = make_optimizer(self.model, self.job.training)

    def train_round(
        self, round_index: int, ended_early: Mapping[tuple[int, int], int] = {}
    ) -> Contribution:
        """Trains the mini-batches of one round. If these are fewer than the job says, the client has a smaller weight.

        Args:
            ended_early: As in `train_job`.
        """
        all_steps = self.job.training.local_steps
        local_steps = ended_early.get((round_index, self.cluster_index), all_steps)
        mini_batches = [self.draw_mini_batch() for _ in range(local_steps)]
        self.losses += train_cluster(
            self.model,
            self.optimizer,
            mini_batches,
            self.job,
            self.cluster_index,
            round_index,
            len(self.losses),
        )
        weight = round(self.task.num_rows * local_steps / all_steps)
        return Contribution(self.cluster_index, weight, copy_weights(self.model))

    def optimizer_state(self) -> dict[str, Tensor]:
        """Returns the optimizer state by name. A tied parameter has its first name in the model."""
        names: dict[Tensor, str] = {
            parameter: name for name, parameter in self.model.named_parameters()
        }
        return {
            f"{names[parameter]}//{entry}": value
            for parameter, values in self.optimizer.state.items()
            for entry, value in values.items()
            if value is not None
        }

    def draw_mini_batch(self) -> MiniBatch:
        """Draws the next mini-batch with the sampler of `collapipe`."""
        self.cursor = begin_round(self.cursor, self.task.num_rows)
        rows, self.cursor = draw(
            self.job.seed, self.cluster_index, self.cursor, self.job.training.mini_batch
        )
        micro_batches = self.task.micro_batches(rows, self.job.schedule.num_micro_batches)
        return [micro_batch.tensors for micro_batch in micro_batches]


def train_job(
    job: JobConfig,
    late_clusters: Mapping[int, Collection[int]] = {},
    ended_early: Mapping[tuple[int, int], int] = {},
    noise_secrets: Sequence[bytes] = (),
) -> Trained:
    """Runs a job from the initial model to the last round.

    Args:
        late_clusters: The clusters that do not take part in a round, by the index of the round.
        ended_early: Number of mini-batches of the clusters that trained fewer than others, by the indices of round and cluster.
        noise_secrets: The secret of each cluster for its noise, if updates are private and averaged securely.
    """
    clients = make_clients(job)
    for round_index in range(job.training.rounds):
        late = late_clusters.get(round_index, ())
        present = [client for client in clients if client.cluster_index not in late]
        before = copy_weights(clients[0].model)
        arrived = [client.train_round(round_index, ended_early) for client in present]
        if noise_secrets:
            # Private updates all count the same.
            arrived = [
                replace(
                    one,
                    num_samples=1,
                    weights=private_weights(
                        job,
                        clients[0].adapter,
                        noise_secrets[one.cluster_index],
                        round_index,
                        before,
                        one.weights,
                    ),
                )
                for one in arrived
            ]
        if len(clients) > 1:
            random.Random(round_index).shuffle(arrived)
            if job.averaging.secure:
                total_samples = 2 * sum(client.task.num_rows for client in clients)
                if noise_secrets:
                    total_samples = len(clients)
                averaged = fixed_point_average(arrived, before, total_samples)
            else:
                averaged = average(arrived)
            for client in clients:
                client.model.load_state_dict(averaged, strict=False)
    return Trained(
        saved_weights(clients[0].model),
        [client.optimizer_state() for client in clients],
        [client.losses for client in clients],
    )


def make_clients(job: JobConfig) -> list[Client]:
    """Loads the rows of each cluster and makes its client. All clients have the same initial model."""
    first = load_task(job, 0, vocabulary=None)
    tasks = [first] + [load_task(job, i, first.vocabulary) for i in range(1, job.clusters)]
    labels = sorted(set().union(*(task.labels for task in tasks)), key=lambda x: (x != "O", x))
    for task in tasks:
        task.set_labels(labels)
    tokenizer = Tokenizer.from_str(first.vocabulary.decode())
    changes = {"lora": None, "freeze_embeddings": False, "base_dtype": "float32"}
    changes["base_quantisation"] = None
    plain = job.model.model_copy(update=changes)
    config_json = create_config_json(plain, job.task, labels, tokenizer)
    adapter = adapter_for(job.model.family, job.task.kind, config_json)
    model = initial_model(adapter, job.model.pretrained, job.seed)
    if job.model.freeze_embeddings:
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            module.requires_grad_(False)
    if job.model.base_dtype != "float32" or job.model.base_quantisation is not None:
        model = reloaded(model, job, adapter.blocks_path)
    if job.model.lora is not None:
        model = add_lora(model, job)
    return [Client(job, i, task, copy.deepcopy(model), adapter) for i, task in enumerate(tasks)]


def reloaded(model: PreTrainedModel, job: JobConfig, blocks_path: str) -> PreTrainedModel:
    """Writes a model to disk, and loads it with the job's type of frozen weights, as a user of `transformers` would."""
    dtype = getattr(torch, job.model.base_dtype)
    options = {}
    if job.model.base_quantisation is not None:
        layers = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=job.model.base_quantisation,
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=[n for n in layers if not n.startswith(blocks_path)],
        )
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        loaded: PreTrainedModel = type(model).from_pretrained(directory, dtype=dtype, **options)
    # The adapter of BART ties weights that its configuration does not tie.
    first_names = {parameter: name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module, _, attribute = name.rpartition(".")
        if (first := first_names[parameter]) != name:
            setattr(loaded.get_submodule(module), attribute, loaded.get_parameter(first))
    return loaded


def add_lora(model: PreTrainedModel, job: JobConfig) -> PreTrainedModel:
    """Adds LoRA as a user of `peft` would."""
    settings = job.model.lora
    assert settings is not None
    # `peft` adapts no layer of this list, but it would adapt one that only ends with such a name.
    labels = ("classification", "ner")
    classifier = ["classifier", "pre_classifier", "pooler"] if job.task.kind in labels else []
    config = LoraConfig(
        r=settings.r,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=settings.target_modules,
        modules_to_save=[*settings.modules_to_save, *classifier] or None,
        use_rslora=settings.use_rslora,
    )
    torch.manual_seed(job.seed)
    changed: PreTrainedModel = get_peft_model(model, config).base_model.model
    if settings.averaging == "product":
        for name, parameter in changed.named_parameters():
            if "lora_A" in name:
                parameter.requires_grad = False
    return changed


def saved_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns the tensors that `save_pretrained` would write, without those of quantised layers.

    Frozen ones have their names without LoRA.
    """
    first_names = {name for name, _ in model.named_parameters()}
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)} - first_names
    left_out = aliases.union(model._keys_to_ignore_on_save or ())
    return {
        name.replace(".base_layer.", ".").replace(".original_module.", "."): tensor
        for name, tensor in copy_weights(model).items()
        if name not in left_out
    }


def copy_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Returns a copy of the model's state, in which a tied tensor has each of its names. Leaves out quantised weights."""
    quantised = tuple(f"{n}.weight" for n, m in model.named_modules() if isinstance(m, Linear4bit))
    return {
        name: tensor.detach().clone()
        for name, tensor in model.state_dict().items()
        if not name.startswith(quantised)
    }
