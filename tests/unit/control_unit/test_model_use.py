"""Which texts a control unit answers."""

from typing import Any

import pytest

from collapipe.control_unit.model_use import ModelUse
from collapipe.errors import InvalidInputError
from collapipe.job import JobConfig
from collapipe.models import create_config_json
from collapipe.tasks import load_task_for_use
from collapipe.tasks.vocabulary import make_vocabulary, parse_vocabulary
from collapipe.v1.control_unit_pb2 import RunModelStart, RunRoundRequest
from collapipe.v1.generation_pb2 import GenerationOptions
from collapipe.v1.model_use_pb2 import ModelUse as Use
from collapipe.v1.model_use_pb2 import Prediction
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
