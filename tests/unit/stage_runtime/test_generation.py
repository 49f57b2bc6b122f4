"""A pipeline that generates gives the tokens of passes over whole rows."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from collapipe.errors import CancelledError, InvalidInputError, WrongStateError
from collapipe.models import GenerationSettings, Head
from collapipe.stage_runtime.compute_lock import COMPUTE_LOCK
from collapipe.tensors import Frame, FrameKind

from .chains import EACH, HALVES, WHOLE, Chain, TinyModel, states_of
from .conftest import MakeAdapter

PROMPTS = [[5, 9, 30], [7], [12, 4, 8, 21, 6], [33, 33]]
NUM_NEW = 4
GREEDY = GenerationSettings(NUM_NEW)


@pytest.fixture(scope="module")
def gpt2(make_adapter: MakeAdapter) -> TinyModel:
    adapter = make_adapter("gpt2")
    return TinyModel(adapter, states_of(adapter), lambda number: {})


@pytest.fixture(scope="module")
def translator(make_adapter: MakeAdapter) -> TinyModel:
    adapter = make_adapter("marian")
    return TinyModel(adapter, states_of(adapter), lambda number: {})


def generate(chain: Chain, prompts: list[list[int]], num_sequences: int) -> list[list[int]]:
    """Generates answers, with `num_sequences` under way, as a control unit does."""
    found: list[list[int]] = [[] for _ in prompts]
    waiting: Iterator[int] = iter(range(len(prompts)))
    under_way: dict[int, int] = {}

    def begin(sequence: int) -> None:
        number = next(waiting, None)
        if number is None:
            under_way.pop(sequence, None)
            if not under_way:
                chain.mailboxes[0].put(Frame(FrameKind.END_GENERATION, 0, 0))
            return
        under_way[sequence] = number
        feed(chain, sequence, 0, torch.tensor([prompts[number]]))

    def take(frame: Frame) -> None:
        assert frame.kind is FrameKind.PREDICTION
        answer = found[under_way[frame.micro_batch]]
        assert frame.step_index == len(answer)
        tokens = frame.tensors["predictions"]
        answer.append(int(tokens))
        if len(answer) == NUM_NEW:
            begin(frame.micro_batch)
        else:
            feed(chain, frame.micro_batch, frame.step_index + 1, tokens)

    chain.stages[0]._send_backward = take
    for sequence in range(num_sequences):
        begin(sequence)
    chain.run_in_parallel(lambda stage: stage.run_generation(num_sequences, GREEDY))
    return found


def feed(chain: Chain, sequence: int, pass_index: int, tokens: Tensor) -> None:
    frame = Frame(FrameKind.GENERATE, pass_index, sequence, {"input_ids": tokens})
    chain.mailboxes[0].put(frame)


def run_one_prompt(
    tiny: TinyModel, take: Callable[[Chain, Frame], None], settings: GenerationSettings = GREEDY
) -> None:
    """Runs the first pass of a single stage, whose tokens `take` gets."""
    chain = tiny.chain([0, tiny.adapter.num_units])
    chain.stages[0]._send_backward = lambda frame: take(chain, frame)
    feed(chain, 0, 0, torch.tensor([[5, 6, 2]]))
    chain.mailboxes[0].put(Frame(FrameKind.END_GENERATION, 0, 0))
    chain.run_in_parallel(lambda stage: stage.run_generation(1, settings))


@torch.no_grad()
def plainly(tiny: TinyModel, prompt: list[int]) -> list[int]:
    """Generates greedily with a pass over the whole row for each token."""
    units = [tiny.adapter.build_unit(index).eval() for index in range(tiny.adapter.num_units)]
    for unit, state in zip(units, tiny.states, strict=True):
        unit.load_state_dict(state)
    head = units[-1]
    assert isinstance(head, Head)
    row = list(prompt)
    for _ in range(NUM_NEW):
        input_ids = torch.tensor([row])
        side = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        activation = None
        for unit in units[:-1]:
            activation = unit(activation, side)
        logits = head.get_submodule("lm_head")(head.get_submodule("transformer.ln_f")(activation))
        row.append(int(logits[0, -1].argmax()))
    return row[len(prompt) :]


@pytest.fixture(scope="module")
def expected(gpt2: TinyModel) -> list[list[int]]:
    return [plainly(gpt2, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("num_sequences", [1, 3])
@pytest.mark.parametrize("cuts", [WHOLE, HALVES, EACH], ids=str)
def test_tokens_of_mixed_sequences_equal_those_of_whole_rows(
    gpt2: TinyModel, expected: list[list[int]], cuts: list[int], num_sequences: int
) -> None:
    chain = gpt2.chain(cuts, [1] * (len(cuts) - 1), capacity=1)
    assert generate(chain, PROMPTS, num_sequences) == expected
    assert len({tuple(answer) for answer in expected}) > 1
    assert generate(chain, PROMPTS[:1], 1) == expected[:1], "a stage generates again"
    assert gpt2.adapter._last_shared is None, "keys and values were kept"


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (Frame(FrameKind.GENERATE, 1, 0), "pass 1 of sequence 0"),
        (Frame(FrameKind.GENERATE, 0, 2), "pass 0 of sequence 2"),
        (Frame(FrameKind.EVALUATE, 0, 0), "EVALUATE"),
    ],
    ids=["out of order", "another sequence", "another kind"],
)
def test_frame_that_does_not_continue_an_answer_is_refused(
    gpt2: TinyModel, frame: Frame, said: str
) -> None:
    chain = gpt2.chain(HALVES, [1, 1])
    chain.mailboxes[0].put(frame.with_tensors({"input_ids": torch.tensor([[5]])}))
    with pytest.raises(WrongStateError, match=said):
        chain.run_in_parallel(lambda stage: stage.run_generation(2, GREEDY))


def test_answer_with_more_tokens_than_the_model_has_positions_is_refused(gpt2: TinyModel) -> None:
    chain = gpt2.chain(HALVES, [1, 1])
    positions = gpt2.adapter.max_length(gpt2.adapter.config)
    feed(chain, 0, 0, torch.full((1, positions), 5))
    feed(chain, 0, 1, torch.tensor([[5]]))
    with pytest.raises(WrongStateError, match=f"{positions + 1} tokens.* {positions} positions"):
        chain.run_in_parallel(lambda stage: stage.run_generation(1, GREEDY))


@pytest.mark.parametrize("temperature", [-1.0, 1e-40, float("inf"), float("nan")])
def test_temperature_that_gives_no_probabilities_is_refused(temperature: float) -> None:
    with pytest.raises(InvalidInputError, match=f"temperature.*{temperature:g}"):
        GenerationSettings(NUM_NEW, temperature)


def test_model_that_labels_texts_generates_nothing(tiny: TinyModel) -> None:
    chain = tiny.chain(HALVES)
    feed(chain, 0, 0, torch.tensor([[5, 6]]))
    with pytest.raises(InvalidInputError, match="labels texts"):
        chain.run_in_parallel(lambda stage: stage.run_generation(1, GREEDY))


def test_tokens_leave_without_the_compute_lock(gpt2: TinyModel, translator: TinyModel) -> None:
    # A neighbour on the same host may need the lock before it takes a token.
    for tiny, least in ((gpt2, 1), (translator, 2)):
        held: list[bool] = []
        run_one_prompt(tiny, lambda chain, frame, held=held: held.append(COMPUTE_LOCK.locked()))
        assert len(held) >= least
        assert not any(held)


def test_job_that_seeds_meanwhile_changes_no_drawn_tokens(translator: TinyModel) -> None:
    drawn = GenerationSettings(NUM_NEW, temperature=1.0, seed=4)
    answers: list[list[int]] = [[], []]
    for seed, answer in enumerate(answers):

        def take(chain: Chain, frame: Frame, seed: int = seed, answer: list[int] = answer) -> None:
            torch.manual_seed(seed)
            answer.append(int(frame.tensors["predictions"]))

        run_one_prompt(translator, take, drawn)
    assert answers[0] == answers[1]
    assert len(answers[0]) > 1


def test_translation_ends_when_its_session_is_aborted(translator: TinyModel) -> None:
    taken: list[Frame] = []
    reason = CancelledError("the caller went away")

    def take(chain: Chain, frame: Frame) -> None:
        taken.append(frame)
        chain.mailboxes[0].fail(reason)

    with pytest.raises(CancelledError) as raised:
        run_one_prompt(translator, take)
    assert raised.value is reason
    assert [frame.step_index for frame in taken] == [0]
