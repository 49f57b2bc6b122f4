"""Submits a job and follows it to its end."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from collapipe.errors import CollapipeError, PeerLostError, WrongStateError
from collapipe.job import LABELLING_TASKS, LANGUAGE_TASKS, JobConfig
from collapipe_client.client import CollaPipeClient
from collapipe_client.emulation_check import EmulationReading
from collapipe_client.live_view import Display
from collapipe_client.local_testbed import LocalTestbed
from collapipe_client.testbed_processes import SCHEDULER
from collapipe_client.view_state import JobView

_SNAPSHOT_SECONDS = 1.0


def run_job(
    client: CollaPipeClient,
    job: JobConfig,
    display: Display,
    *,
    resume: bool = False,
    testbed: LocalTestbed | None = None,
) -> str:
    """Submits a job and shows it until it ends. Ctrl-C cancels the job.

    Args:
        resume: Continue the last job of this name.
        testbed: The testbed that was started for the job, if any. It can say why the scheduler ended.

    Returns:
        The job's id. The outcome is in `display.view`.
    """
    emulates = testbed is not None and testbed.emulation is not None and testbed.emulation.devices
    before = EmulationReading.of(testbed) if testbed is not None and emulates else None
    job_id = client.submit(job, resume)
    try:
        follow_job(client, job_id, display, testbed)
    except KeyboardInterrupt:
        # An error here would hide the interrupt. The scheduler may have ended already.
        with suppress(CollapipeError):
            client.cancel(job_id)
        raise
    if testbed is not None and before is not None:
        try:
            (EmulationReading.of(testbed) - before).check()
        except WrongStateError as error:
            display.note(f"round times are not those of the emulated devices: {error}")
    return job_id


def follow_job(
    client: CollaPipeClient,
    job_id: str,
    display: Display,
    testbed: LocalTestbed | None = None,
) -> None:
    """Shows a job until it ends."""

    def away(reason: str) -> None:
        if testbed is not None and not testbed.supervised and SCHEDULER in testbed.lost():
            raise PeerLostError(SCHEDULER, testbed.describe_loss(SCHEDULER))
        display.note(f"waiting for the scheduler: {reason}")

    with _snapshots(client, job_id, display):
        for event in client.watch(job_id, signs_of_life=True, waiting=away):
            display.show(event)


@contextmanager
def _snapshots(client: CollaPipeClient, job_id: str, display: Display) -> Iterator[None]:
    """Gives the display a snapshot about once in a second, if it shows them."""
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(_SNAPSHOT_SECONDS):
            # A scheduler that is away or older has none. The events tell more.
            with suppress(CollapipeError):
                snapshot = client.snapshot(job_id, display.wanted_clusters())
                if not ended.is_set():
                    display.take(snapshot)

    thread = threading.Thread(target=follow, name="snapshots", daemon=True)
    if display.shows_snapshots:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if display.shows_snapshots:
            thread.join(_SNAPSHOT_SECONDS)  # A scheduler that hangs must not hold up Ctrl-C.


_HOW_TO_LOAD = {
    "classification": """\
from transformers import pipeline
classify = pipeline("text-classification", model={model!r})
print(classify("A sentence of your own."))""",
    "ner": """\
from transformers import pipeline
tag = pipeline("token-classification", model={model!r}, aggregation_strategy="simple")
print(tag("Anna Smith works for Siemens in Berlin.") or "no names found")""",
    "translation": """\
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({model!r})
model = AutoModelForSeq2SeqLM.from_pretrained({model!r})
tokens = model.generate(**tokenizer("A dog runs.", return_tensors="pt"))
print(tokenizer.batch_decode(tokens, skip_special_tokens=True))""",
    "causal_lm": """\
from transformers import pipeline
generate = pipeline("text-generation", model={model!r})
print(generate("Return the", max_new_tokens=20))""",
    "instruction": """\
from transformers import pipeline
answer = pipeline("text-generation", model={model!r}, return_full_text=False)
print(answer("A prompt like those of your rows, or a list of messages.", max_new_tokens=20, do_sample=False))""",
}


_HOW_TO_LOAD_ADAPTER = """\
from peft import PeftConfig, PeftModel
from transformers import AutoConfig, {auto_class}
base = PeftConfig.from_pretrained({model!r}).base_model_name_or_path
config = AutoConfig.from_pretrained({config})
model = {auto_class}.from_pretrained(base, config=config, dtype={dtype!r}{options})
model = PeftModel.from_pretrained(model, {model!r}).merge_and_unload()"""

_HOW_TO_KEEP_THE_END = """
from transformers import GenerationConfig
model.generation_config = GenerationConfig.from_pretrained({model!r})"""

_AUTO_CLASSES = {
    "classification": "AutoModelForSequenceClassification",
    "ner": "AutoModelForTokenClassification",
    "translation": "AutoModelForSeq2SeqLM",
    **dict.fromkeys(LANGUAGE_TASKS, "AutoModelForCausalLM"),
}


def how_to_load(
    task: str, directory: Path, *, is_adapter: bool = False, base_dtype: str = "float32"
) -> str:
    """Returns Python code that uses an exported model, or loads an adapter of `peft`, for the kind of its task.

    Args:
        base_dtype: Type of the frozen weights in the training. The files of the pretrained model may have another one.
    """
    if not is_adapter:
        return _HOW_TO_LOAD[task].format(model=str(directory))
    # Only with labels, the adapter has a configuration of its own.
    labels = task in LABELLING_TASKS
    code = _HOW_TO_LOAD_ADAPTER if labels else _HOW_TO_LOAD_ADAPTER + _HOW_TO_KEEP_THE_END
    return code.format(
        auto_class=_AUTO_CLASSES[task],
        config=repr(str(directory)) if labels else "base",
        model=str(directory),
        dtype=base_dtype,
        # The pretrained model may have other labels, whose layer the adapter replaces.
        options=", ignore_mismatched_sizes=True" * labels,
    )


def how_to_resume(view: JobView, command: str) -> str:
    """Says how many rounds are committed, and which commands continue the job or start it again."""
    if not view.num_rounds_committed:
        remedy = (
            "start again with"
            if view.state == "cancelled"
            else "remove the cause, and start again with"
        )
        return f"no round was committed: {remedy}:\n  {command}"
    return (
        f"{view.num_rounds_committed} of {view.num_rounds} rounds are committed; continue with:\n"
        f"  {command}"
    )
