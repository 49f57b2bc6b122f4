"""One use of a trained model by one cluster: it answers texts, or computes the metrics on the rows of a file."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from collapipe.control_unit.cluster_pipeline import ClusterPipeline
from collapipe.data.findings import few_held_out_rows, find_in_texts, long_rows, unknown_labels
from collapipe.errors import CancelledError, CollapipeError, CorruptDataError, InvalidInputError
from collapipe.evaluation import make_evaluation
from collapipe.finding import in_order
from collapipe.job import JobConfig
from collapipe.mistakes import say_some
from collapipe.models import adapter_for
from collapipe.rpc.finding_messages import to_message
from collapipe.tasks import Task, load_task_for_use
from collapipe.v1 import control_unit_pb2, generation_pb2, job_pb2, model_use_pb2

Emit = Callable[[control_unit_pb2.RunModelResponse], None]
"""Sends a result to the caller."""


_SIGNS_OF_A_WAIT = 15
"""After so many signs of life without an evaluated row, they tell what the hosts wait for."""
_MAX_FILE_BYTES = 1 << 30
"""Largest file of held-out rows. Their control unit reads it as a whole."""


class ModelUse:
    """Runs one use of a model.

    Args:
        job: The job of the request, parsed.
        task: Its held-out rows are those to evaluate, if any.
        pipeline: The stages at the last commit.

    Raises:
        InvalidInputError: A text cannot be answered. Nothing has begun then.
    """

    def __init__(
        self,
        start: control_unit_pb2.RunModelStart,
        job: JobConfig,
        task: Task,
        pipeline: ClusterPipeline,
    ) -> None:
        self._start = start
        self._job = job
        self._task = task
        self._pipeline = pipeline
        prediction = start.use.prediction
        if not (prediction.texts or start.use.HasField("evaluation")):
            raise InvalidInputError("no text was given: give at least one")
        self._options = generation_pb2.GenerationOptions()
        self._options.CopyFrom(prediction.options)
        self._options.max_new_tokens = prediction.options.max_new_tokens or job.task.max_new_tokens
        model = start.round.model
        self._adapter = adapter_for(model.family, model.task, model.config_json)
        self._questions, self._refused = self._encode(prediction)
        mini_batch, parts = job.training.mini_batch, start.round.plan.num_micro_batches
        self._evaluated_together = max(1, mini_batch // parts)
        self._told_rows = self._signs_without_rows = 0

    def run(self, emit: Emit) -> None:
        """Runs the use to its end, and closes the pipeline in any case.

        Raises:
            CollapipeError: The use failed. The model is as before.
        """
        try:
            for index, refusal in self._refused.items():
                _emit(emit, text_index=index, is_last=True, refusal=refusal)
            self._pipeline.configure()
            if self._start.use.HasField("evaluation"):
                _emit(emit, evaluation=self._evaluate())
            elif not self._questions:
                pass
            elif self._task.generates:
                self._generate(emit)
            else:
                self._label(emit)
            self._pipeline.finish(0)
        except CollapipeError as error:
            raise self._pipeline.failure_cause(error) from None
        finally:
            self._pipeline.close()

    def abort(self, reason: CancelledError) -> None:
        """Makes the use end with `reason`. Any thread may call it."""
        self._pipeline.abort(reason)

    def progress(self) -> control_unit_pb2.RunModelResponse:
        """Returns what the use waits for. Aborts it if the pipeline is stalled."""
        self._pipeline.abort_if_stalled()
        num_rows = self._task.num_held_out_rows
        done = min(self._pipeline.num_predictions * self._evaluated_together, num_rows)
        self._signs_without_rows = 0 if done > self._told_rows else self._signs_without_rows + 1
        self._told_rows = done
        # While rows follow each other, nobody needs to know which host waits for which.
        if done and self._signs_without_rows < _SIGNS_OF_A_WAIT:
            return waiting_response(
                f"the evaluation, with {100 * done // num_rows} % of {num_rows} rows done"
            )
        return waiting_response(self._pipeline.waiting_for())

    def _encode(
        self, prediction: model_use_pb2.Prediction
    ) -> tuple[dict[int, Any], dict[int, str]]:
        """Encodes the texts. If some cannot be answered, it refuses all of them and names those, unless they are to be skipped.

        Returns:
            The encoded texts and the reasons for refusals, by the position of the text.
        """
        questions: dict[int, Any] = {}
        refused: dict[int, str] = {}
        texts = prediction.texts
        numbers = prediction.numbers or range(1, len(texts) + 1)
        if len(numbers) != len(texts):
            raise InvalidInputError(
                f"{len(numbers)} numbers were given for {len(texts)} texts: give one for each, or none"
            )
        for index, text in enumerate(texts):
            try:
                questions[index] = self._question(text)
            except InvalidInputError as error:
                refused[index] = str(error)
        if not refused or prediction.skips_refused:
            return questions, refused
        first, reason = next(iter(refused.items()))
        message = f"text {numbers[first]} ({texts[first]!r:.40}): {reason}"
        if len(refused) > 1:
            named = say_some([str(numbers[index]) for index in refused])
            raise InvalidInputError(
                f"{len(refused)} of {len(texts)} texts cannot be answered (number {named}); {message}"
            )
        raise InvalidInputError(message)

    def _question(self, text: str) -> Any:
        """Encodes a text. Refuses one that, with its answer, is longer than the model has positions for."""
        question = self._task.question(text)
        if self._task.generates:
            limit = self._adapter.max_length(self._adapter.config)
            # The decoder of a translator has positions of its own.
            length = len(question.input_ids) if self._task.continues_text else 0
            wanted = self._options.max_new_tokens
            if length + wanted > limit:
                left = f", or ask for at most {limit - length} new tokens" * (length < limit)
                raise InvalidInputError(
                    f"with an answer of {wanted} tokens it needs {length + wanted} positions, more than the {limit} "
                    f"of the model: shorten it{left}"
                )
        return question

    def _evaluate(self) -> job_pb2.Evaluation:
        request = self._start.round
        batches = self._task.held_out_micro_batches(self._evaluated_together)
        predictions = self._pipeline.evaluate(batches)
        sums = self._task.sums(predictions)
        evaluation = make_evaluation(self._task.kind, sums, request.attempt.round_index)
        task, max_length = self._task, self._job.task.max_length
        long = task.num_long_held_out_rows, task.num_held_out_rows
        found = [
            *task.findings,
            unknown_labels(task.held_out_labels, request.labels),
            few_held_out_rows(task.kind, task.num_held_out_rows),
            long_rows(task.kind, max_length, (0, 0), long, is_trained=True),
            *find_in_texts(task.kind, [task.texts]),
        ]
        evaluation.findings.extend(map(to_message, in_order(filter(None, found))))
        return evaluation

    def _label(self, emit: Emit) -> None:
        inputs = [self._task.inputs(question) for question in self._questions.values()]
        predictions = self._pipeline.evaluate(inputs)
        for (index, question), labels in zip(self._questions.items(), predictions, strict=True):
            text = self._task.answer(question, labels)
            _emit(emit, text_index=index, text=text, is_last=True)

    def _generate(self, emit: Emit) -> None:
        questions = list(self._questions.values())
        indices = list(self._questions)
        decoders = [self._task.answer_stream(question) for question in questions]
        lengths = [0] * len(questions)
        end_ids = self._adapter.end_ids
        if self._task.continues_text:
            end_ids.add(self._task.end_id)

        def take(index: int, token: int) -> bool:
            lengths[index] += 1
            goes_on = token not in end_ids and lengths[index] < self._options.max_new_tokens
            text = decoders[index](token)
            _emit(emit, text_index=indices[index], text=text, tokens=[token], is_last=not goes_on)
            return goes_on

        inputs = [self._task.inputs(question) for question in questions]
        prompts = [each.tensors["input_ids"] for each in inputs]
        self._pipeline.generate(prompts, self._options, take, feeds_back=self._task.continues_text)


def open_model_use(
    start: control_unit_pb2.RunModelStart,
    chunks: Iterator[bytes],
    vocabulary: bytes,
    directory: Path,
    make_pipeline: Callable[[control_unit_pb2.RunRoundRequest, JobConfig], ClusterPipeline],
) -> ModelUse:
    """Prepares a use of a model, given the bytes of its evaluated files.

    Args:
        directory: Where these files lie until their rows are read. It must be on a disk and not in memory.

    Raises:
        InvalidInputError: A row of a file or a text is wrong.
        CorruptDataError: Bytes of a file are missing, or there are too many.
    """
    request = start.round
    job = JobConfig.from_json(request.job.config_json)
    with ExitStack() as owned:
        evaluated = None
        if start.use.HasField("evaluation"):
            files = start.use.evaluation.files
            if len(files) != 1 and (job.task.kind, len(files)) != ("translation", 2):
                raise InvalidInputError(
                    f"{len(files)} files to evaluate were given for {job.task.kind}: give one, or two parallel "
                    "files for translation"
                )
            directory.mkdir(exist_ok=True)
            folder = Path(owned.enter_context(TemporaryDirectory(dir=directory)))
            stored = [folder / str(index) for index in range(len(files))]
            _store_files(files, chunks, stored)
            evaluated = ",".join(file.name for file in files), stored
        task = load_task_for_use(job, vocabulary, list(request.labels), evaluated)
    return ModelUse(start, job, task, make_pipeline(request, job))


def waiting_response(waiting_for: str) -> control_unit_pb2.RunModelResponse:
    """Returns a sign of life."""
    output = model_use_pb2.ModelOutput(waiting_for=waiting_for)
    return control_unit_pb2.RunModelResponse(output=output)


def _store_files(
    files: Sequence[model_use_pb2.EvaluatedFile], chunks: Iterator[bytes], paths: Sequence[Path]
) -> None:
    """Stores files that come one after the other. No chunk has bytes of two files."""
    for file, path in zip(files, paths, strict=True):
        if file.total_bytes > _MAX_FILE_BYTES:
            raise InvalidInputError(
                f"{file.name} has {file.total_bytes} bytes, but a file for `collapipe evaluate` may have at most {_MAX_FILE_BYTES} "
                "bytes: divide it into smaller files, and evaluate each one alone"
            )
        missing = file.total_bytes
        with open(path, "wb") as target:
            while missing > 0:
                chunk = next(chunks, b"")
                if not chunk:
                    break
                missing -= target.write(chunk)
        if missing:
            raise CorruptDataError(
                f"{file.name}: {abs(missing)} bytes {'less' if missing > 0 else 'more'} than announced arrived: "
                "evaluate it again, and do not change it meanwhile"
            )


def _emit(emit: Emit, *, evaluation: job_pb2.Evaluation | None = None, **piece: Any) -> None:
    output = model_use_pb2.ModelOutput()
    if evaluation is not None:
        output.evaluation.CopyFrom(evaluation)
    else:
        output.piece.CopyFrom(model_use_pb2.AnswerPiece(**piece))
    emit(control_unit_pb2.RunModelResponse(output=output))
