"""Takes one job from its submission to its end."""

from contextlib import nullcontext, suppress
from pathlib import Path

from collapipe.errors import CollapipeError, PeerLostError, WrongStateError
from collapipe.job import JobConfig
from collapipe_client.client import CollaPipeClient
from collapipe_client.emulation_check import EmulationCheck
from collapipe_client.live_view import Display
from collapipe_client.local_testbed import LocalTestbed
from collapipe_client.testbed_processes import SCHEDULER
from collapipe_client.view_state import JobView


def run_job(
    client: CollaPipeClient,
    job: JobConfig,
    display: Display,
    *,
    resume: bool = False,
    testbed: LocalTestbed | None = None,
) -> str:
    """Submits a job and follows it to its end. Ctrl-C cancels it.

    Args:
        client: Of the scheduler.
        job: The job.
        display: Shows what happens; its view is the outcome.
        resume: Continue the last job of this name.
        testbed: The testbed under the job, when it is this command's own: it knows why its
            scheduler ended.

    Returns:
        The job's id.
    """
    emulates = testbed is not None and testbed.emulation is not None and testbed.emulation.devices
    check = EmulationCheck(testbed) if testbed is not None and emulates else None
    job_id = client.submit(job, resume)
    try:
        with check or nullcontext():
            follow_job(client, job_id, display, testbed)
    except KeyboardInterrupt:
        # The interrupt is the news, not that the scheduler went first.
        with suppress(CollapipeError):
            client.cancel(job_id)
        raise
    if check is not None:
        try:
            check.verdict()
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
    try:
        for event in client.watch(job_id, signs_of_life=True):
            display.show(event)
    except PeerLostError as error:
        if testbed is not None and SCHEDULER in testbed.lost():
            raise PeerLostError(SCHEDULER, testbed.describe_loss(SCHEDULER)) from error
        raise
    if not display.view.ended:
        raise PeerLostError(
            SCHEDULER,
            f"the scheduler at {client.address} ended its report about job {job_id} before the "
            f"job ended: watch again with `collapipe watch {job_id}`",
        )


def how_to_load(task: str, directory: Path) -> str:
    """A few lines of Python that use an exported model."""
    model = str(directory)
    if task == "translation":
        return (
            "from transformers import AutoModelForSeq2SeqLM as Model, AutoTokenizer as Tokenizer\n"
            f"tokenizer, model = (c.from_pretrained({model!r}) for c in (Tokenizer, Model))\n"
            'tokens = model.generate(**tokenizer("A dog runs.", return_tensors="pt"))\n'
            "print(tokenizer.batch_decode(tokens, skip_special_tokens=True))"
        )
    if task == "ner":
        return (
            "from transformers import pipeline\n"
            "tag = pipeline(\n"
            f'    "token-classification", model={model!r}, aggregation_strategy="simple"\n)\n'
            'print(tag("Ada Lovelace lived in London."))'
        )
    return (
        "from transformers import pipeline\n"
        f'classify = pipeline("text-classification", model={model!r})\n'
        'print(classify("Return the names of the files in a directory."))'
    )


def say_resumable(view: JobView, command: str) -> str:
    """Says what is safe, and how to go on."""
    if not view.num_rounds_committed:
        return "no round was committed: start again with the same command"
    return (
        f"{view.num_rounds_committed} of {view.num_rounds} rounds are committed; go on from there "
        "with:\n"
        f"  {command}"
    )
