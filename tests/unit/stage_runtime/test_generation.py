"""A pipeline that generates gives the tokens of passes over whole rows."""

from collections.abc import Iterator

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from collapipe.errors import CancelledError, InvalidInputError, WrongStateError
from collapipe.job import ModelConfig, TaskConfig
from collapipe.models import (
    GenerationSettings,
    Head,
    ModelAdapter,
    adapter_for,
    create_config_json,
    initial_model,
    split_state,
)
from collapipe.stage_runtime.compute_lock import COMPUTE_LOCK
from collapipe.tensors import Frame, FrameKind

from .chains import EACH, HALVES, THIRDS, TRAINING, WHOLE, Chain, States, make_chain

TINY = {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_inner": 24, "n_positions": 24}
TRANSLATOR = {
    "d_model": 16,
    "encoder_layers": 3,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 24,
}
PROMPTS = [[5, 9, 30], [7], [12, 4, 8, 21, 6], [33, 33]]
NUM_NEW = 6
GREEDY = GenerationSettings(NUM_NEW)


def make_adapter(
    tokenizer: Tokenizer, family: str, kind: str, config: dict[str, int]
) -> ModelAdapter:
    task = TaskConfig(kind=kind, max_length=12, max_new_tokens=8)  # type: ignore[arg-type]
    model = ModelConfig(family=family, config=config)
    return adapter_for(family, kind, create_config_json(model, task, [], tokenizer))


def states_of(adapter: ModelAdapter) -> States:
    model = initial_model(adapter, None, seed=3)
    states = split_state(adapter, model)
    return [{name: tensor.clone() for name, tensor in state.items()} for state in states]


@pytest.fixture(scope="module")
def gpt2(make_tokenizer) -> ModelAdapter:  # type: ignore[no-untyped-def]
    return make_adapter(make_tokenizer("gpt2"), "gpt2", "causal_lm", TINY)


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


@torch.no_grad()
def plainly(adapter: ModelAdapter, states: States, prompt: list[int]) -> list[int]:
    """Generates greedily with a pass over the whole row for each token."""
    units = [adapter.build_unit(index).eval() for index in range(adapter.num_units)]
    for unit, state in zip(units, states, strict=True):
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


@pytest.mark.parametrize("num_sequences", [1, 3])
@pytest.mark.parametrize("cuts", [WHOLE, HALVES, THIRDS, EACH], ids=str)
def test_tokens_of_mixed_sequences_equal_those_of_whole_rows(
    gpt2: ModelAdapter, cuts: list[int], num_sequences: int
) -> None:
    states = states_of(gpt2)
    chain = make_chain(gpt2, states, TRAINING, cuts, [1] * (len(cuts) - 1), capacity=1)
    expected = [plainly(gpt2, states, prompt) for prompt in PROMPTS]
    assert generate(chain, PROMPTS, num_sequences) == expected
    assert len({tuple(answer) for answer in expected}) > 1
    assert generate(chain, PROMPTS[:1], 1) == expected[:1], "a stage generates again"


@pytest.mark.parametrize(("sequence", "pass_index"), [(0, 1), (2, 0)])
def test_pass_of_another_sequence_or_out_of_order_is_refused(
    gpt2: ModelAdapter, sequence: int, pass_index: int
) -> None:
    chain = make_chain(gpt2, states_of(gpt2), TRAINING, HALVES, [1, 1])
    feed(chain, sequence, pass_index, torch.tensor([[5]]))
    with pytest.raises(WrongStateError, match=f"^pass {pass_index} of sequence {sequence} arrived"):
        chain.run_in_parallel(lambda stage: stage.run_generation(2, GREEDY))


@pytest.mark.parametrize("temperature", [-1.0, 1e-40, float("inf"), float("nan")])
def test_temperature_that_gives_no_probabilities_is_refused(temperature: float) -> None:
    with pytest.raises(InvalidInputError, match=r"the temperature is .*: give 0, or a number from"):
        GenerationSettings(NUM_NEW, temperature)


def test_keys_and_values_are_freed_at_the_end(gpt2: ModelAdapter) -> None:
    chain = make_chain(gpt2, states_of(gpt2), TRAINING, WHOLE, [1])
    generate(chain, PROMPTS[:1], 1)
    assert gpt2._last_shared is None


def test_frame_of_training_is_refused(gpt2: ModelAdapter) -> None:
    chain = make_chain(gpt2, states_of(gpt2), TRAINING, HALVES, [1, 1])
    chain.mailboxes[0].put(Frame(FrameKind.EVALUATE, 0, 0, {"input_ids": torch.tensor([[5]])}))
    with pytest.raises(WrongStateError, match="got EVALUATE while it generates"):
        chain.run_in_parallel(lambda stage: stage.run_generation(1, GREEDY))


def test_model_that_labels_texts_generates_nothing(bert: ModelAdapter, bert_states: States) -> None:
    chain = make_chain(bert, bert_states, TRAINING, HALVES, [1, 1])
    feed(chain, 0, 0, torch.tensor([[5, 6]]))
    with pytest.raises(InvalidInputError, match="labels texts"):
        chain.run_in_parallel(lambda stage: stage.run_generation(1, GREEDY))


def test_tokens_leave_without_the_compute_lock(
    gpt2: ModelAdapter,
    make_tokenizer,  # type: ignore[no-untyped-def]
) -> None:
    # A neighbour on the same host may need the lock before it takes a token.
    translator = make_adapter(make_tokenizer("marian"), "marian", "translation", TRANSLATOR)
    for adapter, least in ((gpt2, 1), (translator, 2)):
        chain = make_chain(adapter, states_of(adapter), TRAINING, WHOLE, [1])
        held: list[bool] = []
        chain.stages[0]._send_backward = lambda frame, held=held: held.append(COMPUTE_LOCK.locked())
        feed(chain, 0, 0, torch.tensor([[5, 6, 2]]))
        chain.mailboxes[0].put(Frame(FrameKind.END_GENERATION, 0, 0))
        chain.run_in_parallel(lambda stage: stage.run_generation(1, GREEDY))
        assert len(held) >= least
        assert not any(held)


def test_job_that_seeds_meanwhile_changes_no_drawn_tokens(make_tokenizer) -> None:  # type: ignore[no-untyped-def]
    adapter = make_adapter(make_tokenizer("marian"), "marian", "translation", TRANSLATOR)
    drawn = GenerationSettings(NUM_NEW, temperature=1.0, seed=4)
    answers: list[list[int]] = []
    for seed in (1, 2):
        chain = make_chain(adapter, states_of(adapter), TRAINING, WHOLE, [1])
        answer: list[int] = []

        def take(frame: Frame, seed: int = seed, answer: list[int] = answer) -> None:
            torch.manual_seed(seed)
            answer.append(int(frame.tensors["predictions"]))

        chain.stages[0]._send_backward = take
        feed(chain, 0, 0, torch.tensor([[5, 6, 2]]))
        chain.mailboxes[0].put(Frame(FrameKind.END_GENERATION, 0, 0))
        chain.run_in_parallel(lambda stage: stage.run_generation(1, drawn))
        answers.append(answer)
    assert answers[0] == answers[1]
    assert len(answers[0]) > 1


def test_translation_ends_when_its_session_is_aborted(make_tokenizer) -> None:  # type: ignore[no-untyped-def]
    adapter = make_adapter(make_tokenizer("marian"), "marian", "translation", TRANSLATOR)
    chain = make_chain(adapter, states_of(adapter), TRAINING, WHOLE, [1])
    taken: list[Frame] = []

    def take(frame: Frame) -> None:
        taken.append(frame)
        chain.mailboxes[0].fail(CancelledError("the caller went away"))

    chain.stages[0]._send_backward = take
    feed(chain, 0, 0, torch.tensor([[5, 6, 2]]))
    with pytest.raises(CancelledError, match="the caller went away"):
        chain.run_in_parallel(lambda stage: stage.run_generation(1, GREEDY))
    assert [frame.step_index for frame in taken] == [0]
