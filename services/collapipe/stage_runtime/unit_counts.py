"""Counts what the units of a job's model cost. No weight needs memory for that.

`python -m collapipe.stage_runtime.unit_counts` reads jobs with the same data as a JSON list, and writes a list of `ModelCosts`.
With `--timed`, it also times this machine on the model of the first job.
Programs without torch, such as the scheduler, run it as a process. The units are those that hosts would build. So the numbers hold for every family,
with LoRA and with half blocks.
"""

import json
import math
import statistics
import sys
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from collapipe.data.cluster_rows import join_findings, labels_in_order
from collapipe.data.findings import JobFacts
from collapipe.errors import CollapipeError, InvalidInputError
from collapipe.evaluation import first_places
from collapipe.finding import Finding
from collapipe.job import LABELLING_TASKS, JobConfig, TaskConfig
from collapipe.models import (
    Head,
    ModelAdapter,
    Unit,
    adapter_for,
    create_config_json,
    divide_state,
    frozen_names,
)
from collapipe.pretrained_directories import pretrained_directory
from collapipe.stage_runtime.block_profile import count_stash_bytes, make_side, profile_block
from collapipe.stage_runtime.compute_device import ComputeDevice
from collapipe.stage_runtime.operation_counts import StageWork
from collapipe.tasks import (
    declared_tokens,
    load_task,
    make_vocabulary,
    parse_vocabulary,
    read_vocabulary,
)
from collapipe.unit_costs import ModelCosts, UnitCost
from collapipe.weights.tensor_blob import TensorBlob

_ASSUMED_LABELS = ("first", "second")


def count_jobs(jobs: Sequence[JobConfig], *, timed: bool = False) -> list[ModelCosts | None]:
    """Counts the units of each job's model. The data gives labels and vocabulary, if it is on this machine.

    Args:
        jobs: They differ in their models only, and have the vocabulary of the first.
        timed: Whether to time this machine, too, on the model of the first job.

    Returns:
        `None` for a job after the first whose model cannot be made.

    Raises:
        InvalidInputError: The model of the first job cannot be made, or the data cannot be used.
    """
    labels, vocabulary, told = _read_data(jobs[0])
    tokens = parse_vocabulary(vocabulary), declared_tokens(vocabulary)
    costs: list[ModelCosts | None] = []
    for job in jobs:
        try:
            length = told.get("padded_length", job.task.max_length)
            counted = _count_job(job, labels, *tokens, length, timed=timed and job is jobs[0])
            said = {
                name: (*told.get(name, ()), *getattr(counted, name))
                for name in ("notes", "warnings")
            }
            costs.append(counted.model_copy(update=told | said))
        except InvalidInputError:
            if job is jobs[0]:
                raise
            costs.append(None)
    return costs


def _read_data(job: JobConfig) -> tuple[list[str], bytes, dict[str, Any]]:
    """Returns the labels, the vocabulary, and the fields of `ModelCosts` about the data."""
    if _has_data_here(job):
        first = load_task(job, 0, None)
        others = [load_task(job, index, first.vocabulary) for index in range(1, job.clusters)]
        tasks = (first, *others)
        labels = labels_in_order(task.labels for task in tasks)
        num_rows = tuple(task.num_rows for task in tasks)
        num_held_out = sum(task.num_held_out_rows for task in tasks)
        places = first_places(each for task in tasks for each in task.held_out_labels.items())
        note = f"{sum(num_rows)} training rows, {num_held_out} held-out rows"
        note += f", {len(labels)} labels" * bool(labels)
        facts = JobFacts(
            sum(num_rows),
            num_held_out,
            labels,
            places,
            (
                sum(task.num_long_rows for task in tasks),
                sum(task.num_long_held_out_rows for task in tasks),
            ),
            [task.texts for task in tasks],
        )
        found = join_findings(job, facts, (each for task in tasks for each in task.findings))
        told = {
            "notes": (note, *(each.text for each in found if not each.is_warning)),
            "warnings": tuple(each.text for each in found if each.is_warning),
            "num_rows": num_rows,
            "padded_length": mean_longest(
                [length for task in tasks for length in task.lengths],
                job.training.mini_batch // job.schedule.num_micro_batches,
            ),
        }
        return labels, first.vocabulary, told
    labels = list(_ASSUMED_LABELS) if job.task.kind in LABELLING_TASKS else []
    vocabulary = _vocabulary_without_data(job)
    note = (
        f"the job's data is not on this machine: {len(labels)} labels and {parse_vocabulary(vocabulary).get_vocab_size()} tokens in the "
        "vocabulary are assumed"
    )
    return labels, vocabulary, {"notes": (note,)}


def _count_job(
    job: JobConfig,
    labels: Sequence[str],
    tokenizer: Tokenizer,
    declared: Mapping[str, str],
    length: int,
    *,
    timed: bool,
) -> ModelCosts:
    config_json = create_config_json(job.model, job.task, labels, tokenizer, declared)
    adapter = adapter_for(job.model.family, job.task.kind, config_json)
    units = tuple(count_units(adapter, job.task, length))
    about: list[Finding] = []
    if job.model.pretrained is not None and tuple(labels) != _ASSUMED_LABELS:
        about = adapter.describe_pretrained(pretrained_directory(job.model.pretrained))
    flops_per_second = None
    if timed:
        size = job.training.mini_batch // job.schedule.num_micro_batches
        profile = profile_block(adapter, ComputeDevice(), [size], length)
        flops = statistics.mean(unit.flops for unit in units[1:-1])
        flops_per_second = flops / profile.seconds_per_sample
    return ModelCosts(
        units=units,
        flops_per_second=flops_per_second,
        hidden_size=adapter.config.hidden_size,
        period=adapter.period,
        frozen_memory_share=adapter.frozen_memory_share,
        notes=tuple(each.text for each in about if not each.is_warning),
        warnings=tuple(each.text for each in about if each.is_warning),
    )


def mean_longest(lengths: Sequence[int], num_rows: int) -> int:
    """Returns the expected length of the longest of `num_rows` rows that are drawn at random. All of them are padded to it.

    Each draw takes every row with the same probability, and no draw depends on another.
    """
    total, expected = len(lengths), 0.0
    for place, length in enumerate(sorted(lengths), start=1):
        expected += length * ((place / total) ** num_rows - ((place - 1) / total) ** num_rows)
    return math.ceil(round(expected, 6))


def count_units(
    adapter: ModelAdapter, task: TaskConfig, length: int | None = None
) -> list[UnitCost]:
    """Counts each unit. Blocks with the same tensors are built only once.

    Args:
        length: Tokens of a sample, as far as operations are counted. The default is `task.max_length`, for which memory must
            suffice in any case.
    """
    length = task.max_length if length is None else length
    path = adapter.blocks_path
    built: dict[Hashable, tuple[int, Unit | Head, int]] = {}
    costs = [_cost(adapter, adapter.build_unit_on_meta(0)[0], _stash(adapter, 0, task), length)]
    for index, layer in enumerate(adapter.meta_model.get_submodule(path).children()):
        tensors = tuple((n, p.shape, p.requires_grad) for n, p in layer.named_parameters())
        for half in range(adapter.period):
            if (half, tensors) not in built:
                unit_index = 1 + adapter.period * index + half
                unit = adapter.build_unit_on_meta(unit_index)[0]
                built[half, tensors] = index, unit, _stash(adapter, unit_index, task)
            alike, unit, stash_bytes = built[half, tensors]
            names = (f"{path}.{alike}.", f"{path}.{index}.")
            costs.append(_cost(adapter, unit, stash_bytes, length, names))
    head = adapter.num_units - 1
    return [
        *costs,
        _cost(adapter, adapter.build_unit_on_meta(head)[0], _stash(adapter, head, task), length),
    ]


def _stash(adapter: ModelAdapter, unit_index: int, task: TaskConfig) -> int:
    return count_stash_bytes(adapter, unit_index, make_side(adapter, 1, task.max_length))


def _cost(
    adapter: ModelAdapter,
    unit: Unit | Head,
    stash_bytes: int,
    length: int,
    renamed: tuple[str, str] = ("", ""),
) -> UnitCost:
    """Returns the cost of a unit on the meta device. `renamed` maps the part of names in which equal units differ."""
    trained, frozen = (
        {name.replace(*renamed, 1): tensor for name, tensor in tensors.items()}
        for tensors in divide_state(unit.state_dict(), frozen_names(unit))
    )
    work, side = StageWork([unit], adapter.attention_size), make_side(adapter, 1, length)
    backward = work.backward(side)
    return UnitCost(
        weights_bytes=TensorBlob(trained).total_bytes,
        frozen_bytes=TensorBlob(frozen).total_bytes if frozen else 0,
        stash_bytes=stash_bytes,
        flops=work.forward(side).flops + backward.flops,
        gradient_bytes=backward.moved_bytes,
        update_bytes=work.update().moved_bytes,
    )


def _has_data_here(job: JobConfig) -> bool:
    if job.data.source == "hub":
        return job.data.hub_name is not None and Path(job.data.hub_name).is_dir()
    if job.data.source == "stdlib_docstrings":
        return True
    train = [job.data.train] if isinstance(job.data.train, str) else job.data.train or []
    paths = [path for text in (*train, job.data.held_out or "") for path in text.split(",") if path]
    return bool(train) and all(Path(path).exists() for path in paths)


def _vocabulary_without_data(job: JobConfig) -> bytes:
    """Returns the vocabulary of the pretrained directory, or one with as many tokens as the job asks for."""
    if job.model.pretrained is not None:
        directory = pretrained_directory(job.model.pretrained)
        return read_vocabulary(directory, job.model.family)
    size = job.model.vocabulary_size
    tokenizer = parse_vocabulary(make_vocabulary([], size, job.model.family))
    tokenizer.add_tokens(
        [f"<token {number}>" for number in range(size - tokenizer.get_vocab_size())]
    )
    return tokenizer.to_str().encode()


def _main() -> int:
    """Returns 2 if the jobs cannot be used. The reason is then on stderr."""
    torch.set_num_threads(1)
    jobs = [JobConfig.from_dict(document, "the job") for document in json.load(sys.stdin)]
    try:
        counted = count_jobs(jobs, timed="--timed" in sys.argv)
        print(json.dumps([costs and costs.model_dump() for costs in counted]))
    except CollapipeError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(_main())
