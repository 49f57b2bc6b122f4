"""An export that the library loads alone answers as `predict` and `evaluate` do.

Some combinations of family, task, origin of the weights, LoRA and type of the frozen weights are trained and answer in the
process of the test; the campaign has all of them. For three, services train and answer, and a fresh process loads the export.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sacrebleu import corpus_bleu

from collapipe.data.sources import open_file
from collapipe.job import LABELLING_TASKS, LANGUAGE_TASKS
from collapipe_client import LocalTestbed

from .export_oracle import AUTO, check_exports
from .exports import Case, make_job_of, some_cases
from .running import run_job


@pytest.mark.parametrize("case", some_cases(), ids=str)
def test_library_computes_generates_and_measures_what_the_services_do(
    case: Case, tmp_path: Path
) -> None:
    check_exports(case, tmp_path)


READER = """
import json, sys
import transformers

directory, auto_class, texts, options = json.loads(sys.stdin.read())
tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
load = getattr(transformers, auto_class).from_pretrained
model, info = load(directory, output_loading_info=True)
assert not any(info.values()), info
answers = []
for text in texts:
    inputs = tokenizer(text, return_tensors="pt")
    if model.can_generate():
        start = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
        answers.append(model.generate(**inputs, **options)[0, start:].tolist())
    else:
        answers.append(model.config.id2label[int(model(**inputs).logits.argmax())])
print(json.dumps(answers))
"""
"""What a person would write. It imports nothing of CollaPipe."""


@pytest.mark.parametrize(
    ("family", "kind", "origin", "lora"),
    [
        ("bert", "classification", "labels", False),
        ("marian", "translation", "tied", True),
        ("llama", "instruction", "apart", False),
    ],
)
def test_fresh_process_with_the_library_alone_answers_as_the_services(
    testbed: LocalTestbed, family: str, kind: str, origin: str, lora: bool, tmp_path: Path
) -> None:
    case = Case(family, kind, origin, lora, "float32")
    job = make_job_of(
        case, tmp_path, devices_per_cluster=1, training={"rounds": 3, "local_steps": 8}
    )
    assert job.data.held_out is not None
    rows = open_file(job.data.held_out, kind, job.data).read()
    texts = [row.texts[0] for row in rows]
    options: dict[str, Any] = {}  # The export of a translator has its own.
    if kind in LANGUAGE_TASKS:
        options = {"max_new_tokens": 12, "do_sample": False}
    notes: list[str] = []

    def take_note(event: Any) -> None:
        if event.HasField("data_note"):
            notes.append(event.data_note.message)

    with testbed.client() as client:
        job_id = run_job(testbed, job, on_event=take_note).job_id
        client.export(job_id, tmp_path / "export", merged=True)
        evaluation = client.find_job(job_id).evaluation
        tokens: list[list[int]] = [[] for _ in texts]
        answers = ["" for _ in texts]
        for piece in client.predict(job_id, texts, max_new_tokens=options.get("max_new_tokens")):
            tokens[piece.text_index] += piece.tokens
            answers[piece.text_index] += piece.text
    told = [note for note in notes if "labelling layer" in note]
    assert len(told) == (origin == "labels")
    asked = [str(tmp_path / "export"), AUTO[kind].__name__, texts, options]
    read = subprocess.run(
        [sys.executable, "-c", READER],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert read.returncode == 0, read.stderr
    assert json.loads(read.stdout) == (tokens if kind not in LABELLING_TASKS else answers)
    wanted = [row.labels[0] if kind in LABELLING_TASKS else row.texts[1] for row in rows]
    if kind == "translation":
        # The evaluation cuts blanks off, as its metric does.
        expected = corpus_bleu([each.strip() for each in answers], [wanted]).score
    else:
        expected = sum(map(str.__eq__, answers, wanted)) / len(rows)
    assert evaluation.value == pytest.approx(expected)
