import pytest

from collapipe.simulation.transformer_costs import TRANSFORMERS, Transformer, TransformerName


def parameters_of(shape: Transformer) -> int:
    blocks = shape.num_blocks * shape.block_parameters
    return shape.embedding_parameters + blocks + shape.head_parameters


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # The numbers of the published checkpoints, the pooler included.
        ("bert-base", 109_482_240),
        ("bert-large", 335_141_888),
        ("llama-7b", 6_738_415_616),
        ("llama-7b-gqa", 7_241_732_096),
    ],
)
def test_parameters_equal_the_published_model(name: str, parameters: int) -> None:
    assert parameters_of(TRANSFORMERS[name]) == parameters


def test_marian_big_has_the_size_of_the_big_transformer() -> None:
    # Vaswani et al. 2017, table 3, have 213 million with one shared embedding. Here the encoder has its own one.
    shape = TRANSFORMERS["marian-big"]
    shared = parameters_of(shape) - shape.vocabulary_size * shape.hidden_size
    assert shared == pytest.approx(213e6, rel=0.01)


def test_bert_stash_equals_the_count_of_korthikanti_in_32_bits() -> None:
    # The paper counts s h (34 + 5 a s / h) bytes at 16 bits, of which 2 s h + a s^2 bytes are masks.
    s, h, a = 128, 768, 12
    at_16_bits, masks = s * h * 34 + 5 * a * s * s, 2 * s * h + a * s * s
    expected = 2 * (at_16_bits - masks) + masks
    assert TRANSFORMERS["bert-base"].block_stash_bytes(s) == expected


def test_cost_counts_work_in_blocks_and_sixteen_bytes_a_parameter() -> None:
    shape = TRANSFORMERS["llama-7b"]
    cost = shape.cost(512)
    assert cost.block_state_bytes == 16 * shape.block_parameters
    assert cost.activation_bytes == 4 * 512 * 4096
    assert cost.head_work == pytest.approx(
        6 * 32000 * 4096 * 512 / shape.block_flops(512), rel=1e-12
    )
    # At this length attention is a small part, and 6 operations for each parameter and token dominate.
    assert shape.block_flops(512) == pytest.approx(6 * shape.block_parameters * 512, rel=0.05)


@pytest.mark.parametrize("name", ["bert-base", "llama-7b-gqa"])
def test_two_half_blocks_cost_what_their_layer_costs(name: TransformerName) -> None:
    whole = TRANSFORMERS[name].cost(128)
    halves = TRANSFORMERS[name].cost(128, half_blocks=True)
    assert halves.num_blocks == 2 * whole.num_blocks
    last = whole.num_blocks + 1
    for start, stop in ((0, 1), (0, 3), (1, 2), (4, 6), (last, last + 1), (0, last + 1)):
        first, end = max(0, 2 * start - 1), 2 * stop - 1 if stop <= last else 2 * last
        assert halves.work(first, end) == pytest.approx(2 * whole.work(start, stop))
        assert halves.state_bytes(first, end) == pytest.approx(whole.state_bytes(start, stop))
        assert halves.stash_bytes(first, end) == pytest.approx(whole.stash_bytes(start, stop))
    assert halves.work(1, 2) < halves.work(2, 3) == pytest.approx(halves.work(4, 5))


def test_bert_halves_have_the_parameters_of_their_layers() -> None:
    attention, feed_forward = TRANSFORMERS["bert-base"].half_block_parameters
    assert attention == 4 * (768 * 768 + 768) + 2 * 768
    assert feed_forward == 768 * 3072 + 3072 + 3072 * 768 + 768 + 2 * 768


def test_gradients_of_weights_are_a_third_of_the_products_with_weights() -> None:
    shape = TRANSFORMERS["bert-base"]
    assert 0.31 < shape.deferred_share(128) < 1 / 3
