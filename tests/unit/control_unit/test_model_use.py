"""Which texts a control unit answers."""

from pathlib import Path
from typing import Any

import pytest

from collapipe.control_unit.model_use import ModelUse, open_model_use
from collapipe.errors import InvalidInputError
from collapipe.job import JobConfig
from collapipe.models import create_config_json
from collapipe.tasks import load_task_for_use
from collapipe.tasks.vocabulary import make_vocabulary, parse_vocabulary
from collapipe.v1.control_unit_pb2 import RunModelStart, RunRoundRequest
from collapipe.v1.generation_pb2 import GenerationOptions
from collapipe.v1.job_pb2 import JobSpec
from collapipe.v1.model_use_pb2 import EvaluatedFile, FileEvaluation, Prediction
from collapipe.v1.model_use_pb2 import ModelUse as Use
from collapipe.v1.plan_pb2 import ModelSpec, Plan

PROMPT = "the river is green"
MODEL = {
    "family": "gpt2",
    "vocabulary_size": 300,
    "config": {"n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 40},
}


def test_prompt_and_answer_have_at_most_as_many_tokens_as_the_model_has_positions() -> None:
    document = {
        "task": {"kind": "causal_lm", "max_length": 12},
        "data": {"train": "gone"},
        "model": MODEL,
    }
    job = JobConfig.from_dict(document, "job")
    vocabulary = make_vocabulary([PROMPT], 300, "gpt2")
    task = load_task_for_use(job, vocabulary, ())
    config = create_config_json(job.model, job.task, (), parse_vocabulary(vocabulary))
    model = ModelSpec(family="gpt2", task="causal_lm", config_json=config)
    pipeline: Any = None  # A text is refused before the pipeline begins.

    def use(num_new: int) -> ModelUse:
        prediction = Prediction(texts=[PROMPT], options=GenerationOptions(max_new_tokens=num_new))
        request = RunRoundRequest(model=model, plan=Plan(num_micro_batches=1))
        start = RunModelStart(round=request, use=Use(prediction=prediction))
        return ModelUse(start, job, task, pipeline)

    num_left = 40 - len(task.question(PROMPT).input_ids)
    use(num_left)
    with pytest.raises(InvalidInputError, match=f"41 positions.* 40 .*at most {num_left} new"):
        use(num_left + 1)


def open_evaluation(folder: Path, *files: tuple[str, bytes]) -> None:
    """Evaluates the files of a client, given their names and contents, until their rows are read."""
    document = {
        "task": {"kind": "translation"},
        "data": {"train": "gone"},
        "model": {"family": "marian"},
    }
    job = JobSpec(config_json=JobConfig.from_dict(document, "job").to_json())
    listed = [EvaluatedFile(name=name, total_bytes=len(content)) for name, content in files]
    use = Use(evaluation=FileEvaluation(files=listed))
    start = RunModelStart(round=RunRoundRequest(job=job), use=use)
    vocabulary = make_vocabulary([PROMPT], 300, "marian")

    def make_pipeline(request: Any, job: Any) -> Any:
        raise AssertionError("the rows of the files were read")

    chunks = iter([content for _, content in files])
    open_model_use(start, chunks, vocabulary, folder / "evaluated", make_pipeline)


def test_name_of_an_evaluated_file_makes_the_control_unit_read_no_file_of_its_own(
    tmp_path: Path,
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the password\n", encoding="utf-8")
    with pytest.raises(InvalidInputError, match=rf"a,{secret}.* 1 "):
        open_evaluation(tmp_path, (f"a,{secret}", b"a text\n"))


def test_two_evaluated_files_with_the_name_of_one_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"a,b\.jsonl.* 2 "):
        open_evaluation(tmp_path, ("a", b"a text\n"), ("b.jsonl", b"{}\n"))
