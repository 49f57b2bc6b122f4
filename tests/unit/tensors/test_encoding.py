import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import hadamard
from torch import Tensor

from collapipe.errors import CorruptDataError, InvalidInputError
from collapipe.tensors import ACTIVATION, Frame, FrameAssembler, FrameKind, encode_frame
from collapipe.v1.stage_pb2 import FRAME_KIND_FORWARD, FrameHeader
from collapipe.v1.tensor_pb2 import (
    CODEC_BF16,
    CODEC_FP32,
    CODEC_INT4,
    CODEC_INT8,
    DATA_TYPE_FLOAT32,
    DATA_TYPE_INT32,
    Codec,
    DataType,
    TensorHeader,
)

LOSSY = [CODEC_BF16, CODEC_INT8, CODEC_INT4]
SHAPES = [(), (0,), (3, 0), (0, 3), (1,), (7,), (4, 3, 16), (2, 33)]


def across(frame: Frame, codec: Codec, chunk_bytes: int = 1 << 20) -> Frame:
    """Encodes and decodes a frame."""
    header, chunks = encode_frame(frame, codec, chunk_bytes)
    assembler = FrameAssembler()
    arrived = assembler.begin(FrameHeader.FromString(header.SerializeToString()))
    for chunk in chunks:
        assert arrived is None
        arrived = assembler.add(chunk)
    assert arrived is not None
    return arrived


def activation(tensor: Tensor, codec: Codec, kind: FrameKind = FrameKind.FORWARD) -> Tensor:
    return across(Frame(kind, 0, 0, {ACTIVATION: tensor}), codec).tensors[ACTIVATION]


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shape_and_type_survive_every_codec(codec: Codec, shape: tuple[int, ...]) -> None:
    arrived = activation(torch.randn(shape), codec)
    assert (arrived.shape, arrived.dtype) == (shape, torch.float32)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_default_type_that_another_job_sets_for_a_moment_changes_nothing(
    codec: Codec, shape: tuple[int, ...]
) -> None:
    sent = torch.randn(shape)
    expected = activation(sent, codec)
    torch.set_default_dtype(torch.bfloat16)
    try:
        arrived = activation(sent, codec)
    finally:
        torch.set_default_dtype(torch.float32)
    assert arrived.dtype == torch.float32
    assert torch.equal(arrived, expected)


def test_bf16_rounds_as_torch_does() -> None:
    sent = torch.randn(5, 40) * 1e3
    assert torch.equal(activation(sent, CODEC_BF16), sent.to(torch.bfloat16).float())


@given(st.integers(0, 2**31), st.floats(1e-28, 1e30))
def test_int8_error_is_at_most_half_the_scale_of_the_row(seed: int, magnitude: float) -> None:
    sent = torch.randn(6, 33, generator=torch.Generator().manual_seed(seed)) * magnitude
    sent[2] = 0.0
    sent[3] *= 1e-6  # Its scale is still a normal number. Rows with a smaller scale become zero.
    arrived = activation(sent, CODEC_INT8)
    step = sent.abs().amax(dim=1, keepdim=True) / 127
    assert ((arrived - sent).abs() <= 0.5001 * step).all()
    assert torch.equal(arrived[2], torch.zeros(33))


def test_int8_keeps_the_largest_value_of_a_row_and_its_sign() -> None:
    sent = torch.tensor([[1.0, -127.0], [0.5, 0.25]])
    assert torch.equal(activation(sent, CODEC_INT8)[0], sent[0])


@pytest.mark.parametrize("tiny", [1e-45, 1e-42, 1e-38, 1e-36])
def test_int8_of_subnormal_values_is_near_them(tiny: float) -> None:
    arrived = activation(torch.tensor([[tiny, -tiny, tiny / 2]]), CODEC_INT8)
    assert arrived.isfinite().all()
    assert arrived.abs().max() <= 1.01 * tiny


@given(st.integers(0, 2**31), st.floats(1e-28, 1e30), st.integers(1, 100))
def test_int4_error_is_at_most_half_a_step_of_the_rotated_tile(
    seed: int, magnitude: float, width: int
) -> None:
    sent = torch.randn(3, width, generator=torch.Generator().manual_seed(seed)) * magnitude
    sent[1] = 0.0
    arrived = activation(sent, CODEC_INT4)
    assert torch.equal(arrived[1], torch.zeros(width))
    # The squares of the largest values would overflow in fp32.
    sent, arrived = sent.double(), arrived.double()
    rotation = torch.from_numpy(hadamard(32)).double() / 32**0.5
    missing = -width % 32
    rotated = torch.nn.functional.pad(sent, (0, missing)).reshape(-1, 32) @ rotation
    half_step = rotated.abs().amax(dim=1) / 16
    # What the receiver cuts off a tile is part of the error in the rotated values, so the norms are compared.
    error = torch.nn.functional.pad(arrived - sent, (0, missing)).reshape(-1, 32).norm(dim=1)
    # The scale has 8 bits, so its relative error is at most 2^-8, and the largest of 16 levels has 15 times that.
    assert (error <= 32**0.5 * half_step * (1 + 16 * 2**-8) + 1e-37).all()


def test_int4_spreads_a_large_value_over_its_tile_only() -> None:
    sent = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    sent[0, 3] = 100.0
    arrived = activation(sent, CODEC_INT4)
    assert torch.equal(arrived[:, 32:], activation(sent[:, 32:], CODEC_INT4))
    # Without the rotation, the smallest level of the tile would be a sixteenth of 100.
    others = torch.arange(32) != 3
    assert (arrived - sent)[0, :32][others].square().mean().sqrt() < 100 / 16 / 4


@pytest.mark.parametrize("tiny", [1e-45, 1e-42, 1e-38, 1e-36])
def test_int4_of_subnormal_values_is_near_them(tiny: float) -> None:
    arrived = activation(torch.tensor([[tiny, -tiny, tiny / 2]]), CODEC_INT4)
    assert arrived.isfinite().all()
    assert arrived.abs().max() <= 1.5 * tiny


def test_int4_of_values_whose_rotation_overflows_is_not_finite() -> None:
    assert not activation(torch.full((32,), 3e38), CODEC_INT4).isfinite().any()


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_value_that_is_not_finite_stays_so_and_does_not_change_other_rows(
    codec: Codec, bad: float
) -> None:
    sent = torch.randn(3, 8)
    sent[1, 4] = bad
    arrived = activation(sent, codec)
    assert not arrived[1, 4].isfinite()
    assert arrived[[0, 2]].isfinite().all()
    assert torch.equal(arrived[[0, 2]], activation(sent[[0, 2]], codec))


@pytest.mark.parametrize("codec", LOSSY)
def test_codec_always_makes_the_same_bytes(codec: Codec) -> None:
    frame = Frame(FrameKind.FORWARD, 0, 0, {ACTIVATION: torch.randn(9, 50)})
    first, second = (b"".join(encode_frame(frame, codec)[1]) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("codec", "num_bytes"),
    [(CODEC_FP32, 4096), (CODEC_BF16, 2048), (CODEC_INT8, 1040), (CODEC_INT4, 576)],
)
def test_header_announces_encoded_bytes_and_frames_count_decoded_bytes(
    codec: Codec, num_bytes: int
) -> None:
    frame = Frame(FrameKind.BACKWARD, 0, 0, {ACTIVATION: torch.randn(2, 2, 256)})
    header, chunks = encode_frame(frame, codec)
    assert header.tensors[0].byte_length == sum(len(chunk) for chunk in chunks) == num_bytes
    assert frame.byte_length == across(frame, codec).byte_length == 4096


@pytest.mark.parametrize("codec", LOSSY)
def test_only_activations_and_their_gradients_are_encoded(codec: Codec) -> None:
    beside = {
        "attention_mask": torch.ones(3, 4, dtype=torch.int64),
        "labels": torch.tensor([1, -100]),
        "weights": torch.randn(3, 4),
    }
    for kind in (FrameKind.FORWARD, FrameKind.EVALUATE, FrameKind.BACKWARD):
        sent = Frame(kind, 0, 0, {ACTIVATION: torch.randn(3, 4), **beside})
        arrived = across(sent, codec).tensors
        assert not torch.equal(arrived[ACTIVATION], sent.tensors[ACTIVATION])
        assert all(torch.equal(arrived[name], tensor) for name, tensor in beside.items())
    predicted = torch.randn(3, 4)
    assert torch.equal(activation(predicted, codec, FrameKind.PREDICTION), predicted)
    half = torch.randn(3, 4).half()
    assert torch.equal(activation(half, codec), half)


@pytest.mark.parametrize("codec", LOSSY)
def test_chunks_that_cut_through_rows_and_scales_arrive(codec: Codec) -> None:
    frame = Frame(FrameKind.FORWARD, 0, 0, {ACTIVATION: torch.randn(7, 13)})
    whole = across(frame, codec).tensors[ACTIVATION]
    assert torch.equal(across(frame, codec, 3).tensors[ACTIVATION], whole)


@pytest.mark.parametrize("codec", LOSSY)
def test_tensor_that_is_not_contiguous_is_encoded_in_its_own_order(codec: Codec) -> None:
    sent = torch.randn(16, 5).T
    assert torch.equal(activation(sent, codec), activation(sent.contiguous(), codec))


# --- corrupt headers and data


def lossy_header(
    codec: int,
    shape: list[int],
    byte_length: int,
    data_type: DataType = DATA_TYPE_FLOAT32,
) -> FrameHeader:
    tensor = TensorHeader(
        name=ACTIVATION,
        data_type=data_type,
        codec=codec,  # type: ignore[arg-type]
        shape=shape,
        byte_length=byte_length,
    )
    return FrameHeader(kind=FRAME_KIND_FORWARD, tensors=[tensor])


@pytest.mark.parametrize(
    ("codec", "shape", "byte_length"),
    [
        (CODEC_BF16, [4], 16),
        (CODEC_BF16, [4], 7),
        (CODEC_INT8, [2, 4], 8),
        (CODEC_INT8, [2, 4], 32),
        (CODEC_INT8, [2, -4], 0),
        (CODEC_INT8, [-2, -4], 0),
        (CODEC_INT8, [0, 4], 4),
        (CODEC_INT4, [2, 33], 33),
        (CODEC_INT4, [2, -33], 72),
        (CODEC_INT4, [-2, -32], 36),
        (CODEC_INT4, [0, 4], 18),
    ],
)
def test_length_that_does_not_fit_the_codec_is_corrupt(
    codec: Codec, shape: list[int], byte_length: int
) -> None:
    with pytest.raises(CorruptDataError, match="'activation' of shape"):
        FrameAssembler().begin(lossy_header(codec, shape, byte_length))


@pytest.mark.parametrize("codec", [0, 5, 99])
def test_codec_that_is_not_known_is_corrupt(codec: int) -> None:
    with pytest.raises(CorruptDataError, match=f"codec {codec}, which this version does not know"):
        FrameAssembler().begin(lossy_header(codec, [2, 4], 16))


def test_lossy_codec_of_integers_is_corrupt() -> None:
    with pytest.raises(CorruptDataError, match="data type 5 and codec 2"):
        FrameAssembler().begin(lossy_header(CODEC_BF16, [2], 4, DATA_TYPE_INT32))


def test_frame_whose_decoded_size_is_over_the_limit_is_refused_before_allocation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: pytest.fail("allocated"))
    header = lossy_header(CODEC_INT8, [1, 1 << 16], (1 << 16) + 4)
    with pytest.raises(InvalidInputError, match=f"{1 << 18} bytes exceeds the limit of {1 << 17}"):
        FrameAssembler(dict.fromkeys(FrameKind, 1 << 17)).begin(header)


def test_narrow_rows_of_int4_count_with_the_memory_that_decoding_them_takes() -> None:
    header = lossy_header(CODEC_INT4, [1 << 16, 1], 18 << 16)  # each row is a tile of 32 values
    with pytest.raises(InvalidInputError, match=f"{1 << 23} bytes exceeds the limit of {1 << 20}"):
        FrameAssembler(dict.fromkeys(FrameKind, 1 << 20)).begin(header)


@pytest.mark.parametrize("codec", LOSSY)
def test_flipped_bit_is_corrupt(codec: Codec) -> None:
    header, chunks = encode_frame(
        Frame(FrameKind.FORWARD, 0, 0, {ACTIVATION: torch.randn(9)}), codec
    )
    data = bytearray(b"".join(chunks))
    data[5] ^= 1
    assembler = FrameAssembler()
    assembler.begin(header)
    with pytest.raises(CorruptDataError, match="CRC-32"):
        assembler.add(bytes(data))
