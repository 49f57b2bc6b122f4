"""A whole job in one process: clients in plain torch, averaged after every round.

From `collapipe` come only the job file, the initial model and the rows.
"""

import copy
import random
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from collapipe.job import JobConfig
from collapipe.models import adapter_for, create_config_json, initial_model
from collapipe.tasks import Cursor, Task, begin_round, draw, load_task
from reference.centralized import MiniBatch, make_optimizer, train_cluster
from reference.fedavg import Contribution, average


@dataclass(frozen=True)
class Trained:
    """What a job leads to."""

    weights: dict[str, Tensor]
    """The global model: what `save_pretrained` would write, tied tensors under their first name."""
    optimizer_states: list[dict[str, Tensor]]
    """Of each cluster, by "PARAMETER//ENTRY"."""
    losses: list[list[float]]
    """Of each cluster, one an optimizer step."""


@dataclass
class Client:
    """One cluster: its data, its model and its optimizer."""

    job: JobConfig
    cluster_index: int
    task: Task
    model: PreTrainedModel
    cursor: Cursor = field(default_factory=Cursor)
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = make_optimizer(self.model, self.job.training)

    def train_round(self, round_index: int) -> Contribution:
        """Takes the local steps of one round."""
        mini_batches = [self.draw_mini_batch() for _ in range(self.job.training.local_steps)]
        self.losses += train_cluster(
            self.model,
            self.optimizer,
            mini_batches,
            self.job,
            self.cluster_index,
            round_index,
            len(self.losses),
        )
        return Contribution(self.cluster_index, self.task.num_rows, copy_weights(self.model))

    def optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer's state by name; a tied parameter has its first name in the model."""
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
        """The next mini-batch, as the sampler says."""
        self.cursor = begin_round(self.cursor, self.task.num_rows)
        rows, self.cursor = draw(
            self.job.seed, self.cluster_index, self.cursor, self.job.training.mini_batch
        )
        micro_batches = self.task.micro_batches(rows, self.job.schedule.num_micro_batches)
        return [micro_batch.tensors for micro_batch in micro_batches]


def train_job(job: JobConfig) -> Trained:
    """Runs a job from its initial model to its end."""
    clients = make_clients(job)
    for round_index in range(job.training.rounds):
        arrived = [client.train_round(round_index) for client in clients]
        if len(clients) > 1:
            random.Random(round_index).shuffle(arrived)
            averaged = average(arrived)
            for client in clients:
                client.model.load_state_dict(averaged)
    return Trained(
        saved_weights(clients[0].model),
        [client.optimizer_state() for client in clients],
        [client.losses for client in clients],
    )


def make_clients(job: JobConfig) -> list[Client]:
    """Loads each cluster's rows and gives every client the same initial model."""
    first = load_task(job, 0, vocabulary=None)
    tasks = [first] + [load_task(job, i, first.vocabulary) for i in range(1, job.clusters)]
    labels = sorted(set().union(*(task.labels for task in tasks)), key=lambda x: (x != "O", x))
    for task in tasks:
        task.set_labels(labels)
    tokenizer = Tokenizer.from_str(first.vocabulary.decode())
    config_json = create_config_json(job.model, job.task, labels, tokenizer)
    adapter = adapter_for(job.model.family, job.task.kind, config_json)
    model = initial_model(adapter, job.model.pretrained, job.seed)
    return [Client(job, i, task, copy.deepcopy(model)) for i, task in enumerate(tasks)]


def saved_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors that make the model, each once."""
    first_names = {name for name, _ in model.named_parameters()}
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)} - first_names
    left_out = aliases.union(model._keys_to_ignore_on_save or ())
    return {name: tensor for name, tensor in copy_weights(model).items() if name not in left_out}


def copy_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of the model's state, every tensor under each of its names."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
