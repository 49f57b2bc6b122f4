"""Trains tiny models of every family in the process of the test, exports them, and answers with the units as hosts would."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from reference.tiny_jobs import make_job
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from collapipe.control_unit.model_use import ModelUse
from collapipe.edge_server.commit_store import CommitStore
from collapipe.edge_server.global_model import GlobalModel
from collapipe.job import FAMILIES, LABELLING_TASKS, LANGUAGE_TASKS, JobConfig
from collapipe.models import (
    GenerationSettings,
    Head,
    KeyValues,
    TokenChooser,
    adapter_class,
    adapter_for,
    divide_state,
)
from collapipe.tasks import (
    MicroBatch,
    load_task,
    load_task_for_use,
    parse_vocabulary,
    write_tokenizer_files,
)
from collapipe.v1.control_unit_pb2 import RunModelResponse, RunModelStart, RunRoundRequest
from collapipe.v1.generation_pb2 import GenerationOptions
from collapipe.v1.job_pb2 import Evaluation
from collapipe.v1.model_use_pb2 import FileEvaluation, Prediction
from collapipe.v1.model_use_pb2 import ModelUse as Use
from collapipe.v1.plan_pb2 import Plan
from collapipe.weights.blob_cache import BlobCache
from collapipe.weights.blob_store import BlobStore
from collapipe.weights.tensor_blob import TensorBlob

NUM_STEPS = 25
MAX_NEW_TOKENS = 8
"""Room for the answers that the training gives, and for more if the end is missed."""


@dataclass(frozen=True)
class Case:
    """A combination of settings that decide what an export is.

    Args:
        origin: "random"; or a pretrained directory: "apart" has no tied embeddings across hosts, "tied" has; "labels" has a
            labelling layer of the same task, "encoder" has none.
        lora: Whether the job has LoRA.
        dtype: Type of the frozen weights.
    """

    family: str
    kind: str
    origin: str
    lora: bool
    dtype: str

    def __str__(self) -> str:
        lora = "lora" if self.lora else "full"
        return f"{self.family}-{self.kind}-{self.origin}-{lora}-{self.dtype}"


def cases() -> Iterator[Case]:
    """Yields all combinations that a job may have. With frozen weights in 16 bits, each type has one origin for each family."""
    for family, kinds in FAMILIES.items():
        for kind in kinds:
            labels = kind in LABELLING_TASKS
            origins = ("random", "encoder", "labels") if labels else ("random", "apart", "tied")
            if family == "bart":
                origins = ("random", "tied")  # A configuration of BART ties all embeddings or none.
            for origin, lora in product(origins, (False, True)):
                yield Case(family, kind, origin, lora, "float32")
            if not labels:
                yield Case(family, kind, origins[1], True, "bfloat16")
                yield Case(family, kind, origins[-1], True, "float16")


def some_cases() -> list[Case]:
    """Chooses the cases that are the first of their family with or without LoRA, of their task and origin, or of their type."""
    seen: set[Any] = set()
    chosen = []
    for case in cases():
        new = {(case.family, case.lora), (case.kind, case.origin), case.dtype}
        if not new <= seen:
            seen |= new
            chosen.append(case)
    return chosen


def make_job_of(case: Case, folder: Path, **changes: Any) -> JobConfig:
    """Writes the data and the pretrained directory of a case. Returns its job."""
    lora = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"} if case.lora else None
    rows: dict[str, Any] = {"num_rows": (24,), "num_held_out": 6, "base_dtype": case.dtype}
    job = make_job(folder, case.family, case.kind, num_blocks=2, lora=lora, **rows, **changes)
    if case.origin == "random":
        return job
    directory = write_pretrained(job, case, folder / "pretrained")
    settings = {"pretrained": str(directory), "config": {}}
    return job.model_copy(update={"model": job.model.model_copy(update=settings)})


class Trained:
    """A job that was trained in this process, and what `predict` and `evaluate` answer for it."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.job = case, make_job_of(case, folder)
        job = self.job
        self.task = load_task(job, 0, None)
        self.labels = self.task.labels
        self.task.set_labels(self.labels)
        store = BlobStore(folder / "job" / "blobs")
        commits = CommitStore(folder)
        self._model = GlobalModel(folder / "job", commits, store, BlobCache(folder / "frozen"))
        self._model.prepare(job, self.labels, self.task.vocabulary)
        spec, _ = self._model.model_spec()
        self._spec, self.adapter = spec, adapter_for(spec.family, spec.task, spec.config_json)
        units: list[Any] = []
        for index, state in enumerate(self._model._states(self.adapter)):
            unit = self.adapter.build_unit(index)
            unit.load_state_dict(state)
            units.append(unit)
        *self._body, self._head = units
        self._train()
        commit = self._model.commit()
        for index, unit in enumerate(units):
            unit.eval()
            weights, _ = divide_state(unit.state_dict(), self.adapter.frozen_names(index))
            blob = TensorBlob(weights)
            store.put(blob.digest, blob.read(), is_checked=True)
            commit.global_units[index].weights_digest = blob.digest
        commits.replace_commit(commit)

    def export(self, directory: Path, *, merged: bool = False) -> Path:
        directory.mkdir()
        self._model.export(directory, merged=merged)
        return directory

    def evaluate(self) -> Evaluation:
        """Does what `collapipe evaluate` does, with the held-out rows of the job."""
        assert self.job.data.held_out is not None
        files = [Path(name) for name in self.job.data.held_out.split(",")]
        use = Use(evaluation=FileEvaluation())
        [output] = self._use(use, (self.job.data.held_out, files))
        return output.output.evaluation

    def predict(self, texts: Sequence[str]) -> list[tuple[list[int], str]]:
        """Does what `collapipe predict` does. Returns the tokens and the text of each answer."""
        options = GenerationOptions(max_new_tokens=MAX_NEW_TOKENS)
        answers: list[tuple[list[int], str]] = [([], "") for _ in texts]
        for response in self._use(Use(prediction=Prediction(texts=texts, options=options)), None):
            piece = response.output.piece
            tokens, text = answers[piece.text_index]
            answers[piece.text_index] = [*tokens, *piece.tokens], text + piece.text
        return answers

    @torch.no_grad()
    def logits(self, batch: MicroBatch) -> Tensor:
        """Returns the logits that the units give for a micro-batch."""
        side, head = batch.tensors, self._head
        activation = self._run(side)
        if self.case.kind != "translation":
            logits: Tensor = head._logits(activation)
            return logits
        labels = head.whole_model.prepare_decoder_input_ids_from_labels(side["labels"])
        whole: Tensor = head.whole_model(
            encoder_outputs=(activation,),
            attention_mask=side["attention_mask"],
            decoder_input_ids=labels,
        ).logits
        return whole

    def _train(self) -> None:
        torch.manual_seed(0)
        modules = [*self._body, self._head]
        parameters = [p for unit in modules for p in unit.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        for step in range(NUM_STEPS):
            rows = [(8 * step + row) % self.task.num_rows for row in range(8)]
            [batch] = self.task.micro_batches(rows, 1)
            loss = self._head.loss_sum(self._run(batch.tensors), batch.tensors, 0.0)
            optimizer.zero_grad()
            (loss / batch.num_targets).backward()
            optimizer.step()

    def _run(self, side: Any, earlier: KeyValues | None = None) -> Any:
        activation = None
        for unit in self._body:
            activation = unit(activation, side, earlier)
        return activation

    def _use(self, use: Use, evaluated: Any) -> list[RunModelResponse]:
        task = load_task_for_use(self.job, self.task.vocabulary, self.labels, evaluated)
        request = RunRoundRequest(
            model=self._spec, plan=Plan(num_micro_batches=1), labels=self.labels
        )
        start = RunModelStart(round=request, use=use)
        found: list[RunModelResponse] = []
        pipeline: Any = _Units(self._run, self._head)
        ModelUse(start, self.job, task, pipeline).run(found.append)
        return found


class _Units:
    """Stands for the pipeline of a cluster. All units are in this process."""

    def __init__(self, run: Callable[..., Any], head: Head) -> None:
        self._run, self._head = run, head

    def configure(self) -> None:
        pass

    def finish(self, num_samples: int) -> None:
        pass

    def close(self) -> None:
        pass

    def failure_cause(self, error: Exception) -> Exception:
        return error

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        return [self._head.predict(self._run(each.tensors), each.tensors) for each in batches]

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Tensor],
        options: GenerationOptions,
        take: Callable[[int, int], bool],
        *,
        feeds_back: bool,
    ) -> None:
        for number, prompt in enumerate(prompts):
            chooser = TokenChooser(GenerationSettings(options.max_new_tokens))
            earlier, tokens, length, goes_on = KeyValues(), prompt, 0, True
            emitted: list[int] = []
            while goes_on:
                length += tokens.shape[1]
                mask = torch.ones((1, length), dtype=torch.int64)
                side = {"input_ids": tokens, "attention_mask": mask}
                activation = self._run(side, earlier)
                emitted.clear()
                self._head.generate(activation, side, chooser, emitted.append)
                goes_on = all([take(number, token) for token in emitted]) and feeds_back
                tokens = torch.tensor([emitted])


def write_pretrained(job: JobConfig, case: Case, directory: Path) -> Path:
    """Writes a model with random weights as `transformers` would, and the tokenizer of the job's rows.

    Its configuration names another end token than its tokenizer, as those of many chat models do.
    """
    task = load_task(job, 0, None)
    tokenizer = parse_vocabulary(task.vocabulary)
    adapter = adapter_class(case.family)
    values = {**job.model.config, **adapter.vocabulary_values(tokenizer)}
    unknown = tokenizer.get_vocab_size() - 1
    if case.origin == "labels":
        names = ["another", *reversed(task.labels)]
        values |= {
            "id2label": dict(enumerate(names)),
            "label2id": {n: i for i, n in enumerate(names)},
        }
    elif case.kind not in LABELLING_TASKS:
        key = (
            "share_encoder_decoder_embeddings" if case.family == "marian" else "tie_word_embeddings"
        )
        values |= {key: case.origin == "tied", "eos_token_id": unknown}
    torch.manual_seed(1)
    config = AutoConfig.for_model(case.family, **values)
    model: Any = adapter.model_classes[case.kind](config)
    if case.origin == "encoder":
        model = model.base_model
    if case.kind in LANGUAGE_TASKS:
        ends = [unknown, unknown - 1] if case.origin == "tied" else unknown
        model.generation_config = GenerationConfig(
            eos_token_id=ends, do_sample=True, top_p=0.5, bad_words_ids=[[unknown - 2]]
        )
    elif case.kind == "translation":
        model.generation_config = GenerationConfig(
            eos_token_id=unknown,
            forced_eos_token_id=unknown,
            decoder_start_token_id=config.decoder_start_token_id,
            forced_bos_token_id=unknown - 1,
            bad_words_ids=[[unknown - 2], [unknown - 3, unknown - 4]],
            num_beams=4,
            length_penalty=2.0,
            max_length=30,
        )
    if case.origin == "apart":
        model = model.to(torch.bfloat16)  # The files of most language models have this type.
    model.save_pretrained(directory)
    write_tokenizer_files(directory, task.vocabulary, case.family, 32)
    return directory
