"""Tests of frames, and of the codecs that encode the activation in them."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import hadamard
from torch import Tensor

from collapipe.errors import CollapipeError, CorruptDataError, InvalidInputError
from collapipe.tensors import (
    ACTIVATION,
    CHUNK_BYTES,
    Frame,
    FrameAssembler,
    FrameKind,
    encode_frame,
)
from collapipe.v1.stage_pb2 import FRAME_KIND_BACKWARD, FRAME_KIND_FORWARD, FrameHeader
from collapipe.v1.tensor_pb2 import (
    CODEC_BF16,
    CODEC_FP32,
    CODEC_INT4,
    CODEC_INT8,
    DATA_TYPE_FLOAT32,
    DATA_TYPE_INT32,
    Codec,
    TensorHeader,
)

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.bool,
]
LOSSY = [CODEC_BF16, CODEC_INT8, CODEC_INT4]
SHAPES = [(), (0,), (3, 0), (0, 3), (1,), (7,), (4, 3, 16), (2, 33)]


def frame_of(*tensors: Tensor, kind: FrameKind = FrameKind.FORWARD) -> Frame:
    return Frame(kind, 5, 2, {f"t{number}": tensor for number, tensor in enumerate(tensors)}, 3)


def over_the_wire(
    frame: Frame,
    codec: Codec = CODEC_FP32,
    chunk_bytes: int = CHUNK_BYTES,
    assembler: FrameAssembler | None = None,
) -> Frame:
    """Encodes and decodes a frame, and serialises the header in between."""
    assembler = assembler or FrameAssembler()
    header, chunks = encode_frame(frame, codec, chunk_bytes)
    arrived = assembler.begin(FrameHeader.FromString(header.SerializeToString()))
    for chunk in chunks:
        assert arrived is None, "the frame was complete before its last chunk"
        arrived = assembler.add(chunk)
    assert arrived is not None
    return arrived


def activation(
    tensor: Tensor,
    codec: Codec,
    kind: FrameKind = FrameKind.FORWARD,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    sent = Frame(kind, 0, 0, {ACTIVATION: tensor})
    return over_the_wire(sent, codec, chunk_bytes).tensors[ACTIVATION]


def assert_same(arrived: Frame, sent: Frame) -> None:
    assert arrived.with_tensors({}) == sent.with_tensors({})
    assert list(arrived.tensors) == list(sent.tensors)
    for name, tensor in sent.tensors.items():
        other = arrived.tensors[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
        raw = tensor.contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(other.reshape(-1).view(torch.uint8), raw)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_arrive_bit_for_bit(dtype: torch.dtype) -> None:
    for shape in [(), (0,), (3, 0, 2), (1,), (2, 3, 5)]:
        sent = frame_of((torch.randn(shape) * 50).to(dtype))
        assert_same(over_the_wire(sent), sent)


def test_special_values_and_tensors_that_are_not_contiguous_arrive_as_they_are() -> None:
    special = torch.tensor([float("nan"), -0.0, float("-inf"), 1e-45])
    sent = frame_of(special, torch.arange(12.0).reshape(3, 4).T)
    assert_same(over_the_wire(sent), sent)


def test_frames_with_no_tensors_or_empty_ones_arrive_one_after_the_other() -> None:
    assembler = FrameAssembler()
    for count in range(4):
        for tensors in itertools.product([torch.empty(0, 4), torch.randn(3)], repeat=count):
            sent = frame_of(*tensors)
            assert_same(over_the_wire(sent, assembler=assembler), sent)


@pytest.mark.parametrize("kind", list(FrameKind))
def test_kind_arrives_and_has_its_direction(kind: FrameKind) -> None:
    assert over_the_wire(frame_of(torch.zeros(1), kind=kind)).kind is kind
    others = (FrameKind.BACKWARD, FrameKind.PREDICTION, FrameKind.LABELS)
    assert kind.towards_head == (kind not in others)


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_chunks_are_full_and_contain_bytes_of_one_tensor(extra: int) -> None:
    sizes = [CHUNK_BYTES + extra, 7]
    sent = frame_of(*(torch.arange(size).to(torch.int8) for size in sizes))
    _, chunks = encode_frame(sent)
    expected = [CHUNK_BYTES + extra] if extra < 1 else [CHUNK_BYTES, extra]
    assert [len(chunk) for chunk in chunks] == [*expected, 7]
    assert_same(over_the_wire(sent), sent)
    assert sent.byte_length == sum(sizes)


def test_element_type_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"'t0'.* torch.float64.*torch.float32"):
        encode_frame(frame_of(torch.zeros(1, dtype=torch.float64)))


# --- lossy codecs


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shape_and_type_survive_also_when_another_job_sets_the_default_type_for_a_moment(
    codec: Codec, shape: tuple[int, ...]
) -> None:
    sent = torch.randn(shape)
    expected = activation(sent, codec)
    torch.set_default_dtype(torch.bfloat16)
    try:
        arrived = activation(sent, codec)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (arrived.shape, arrived.dtype) == (shape, torch.float32)
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


@pytest.mark.parametrize(("codec", "most"), [(CODEC_INT8, 1.01), (CODEC_INT4, 1.5)])
@pytest.mark.parametrize("tiny", [1e-45, 1e-42, 1e-38, 1e-36])
def test_subnormal_values_stay_near_themselves(codec: Codec, most: float, tiny: float) -> None:
    arrived = activation(torch.tensor([[tiny, -tiny, tiny / 2]]), codec)
    assert arrived.isfinite().all()
    assert arrived.abs().max() <= most * tiny


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
    assert frame.byte_length == over_the_wire(frame, codec).byte_length == 4096


@pytest.mark.parametrize("codec", LOSSY)
def test_only_activations_and_their_gradients_are_encoded(codec: Codec) -> None:
    beside = {
        "attention_mask": torch.ones(3, 4, dtype=torch.int64),
        "labels": torch.tensor([1, -100]),
        "weights": torch.randn(3, 4),
    }
    for kind in (FrameKind.FORWARD, FrameKind.EVALUATE, FrameKind.BACKWARD):
        sent = Frame(kind, 0, 0, {ACTIVATION: torch.randn(3, 4), **beside})
        arrived = over_the_wire(sent, codec).tensors
        assert not torch.equal(arrived[ACTIVATION], sent.tensors[ACTIVATION])
        assert all(torch.equal(arrived[name], tensor) for name, tensor in beside.items())
    predicted = torch.randn(3, 4)
    assert torch.equal(activation(predicted, codec, FrameKind.PREDICTION), predicted)
    half = torch.randn(3, 4).half()
    assert torch.equal(activation(half, codec), half)


@pytest.mark.parametrize("codec", LOSSY)
def test_chunks_that_cut_through_rows_arrive_in_the_order_of_the_tensor(codec: Codec) -> None:
    sent = torch.randn(13, 7).T
    whole = activation(sent, codec)
    assert torch.equal(activation(sent.contiguous(), codec, chunk_bytes=3), whole)


# --- corrupt headers and data


@pytest.mark.parametrize("codec", [CODEC_FP32, *LOSSY])
def test_flipped_bit_is_corrupt(codec: Codec) -> None:
    sent = Frame(FrameKind.FORWARD, 0, 0, {ACTIVATION: torch.randn(9)})
    header, chunks = encode_frame(sent, codec)
    data = bytearray(b"".join(chunks))
    data[5] ^= 1
    assembler = FrameAssembler()
    assembler.begin(header)
    with pytest.raises(CorruptDataError, match="'activation'.*CRC-32"):
        assembler.add(bytes(data))


def test_bytes_that_the_header_does_not_announce_are_corrupt() -> None:
    with pytest.raises(CorruptDataError, match="3 bytes"):
        FrameAssembler().add(b"abc")
    header, chunks = encode_frame(frame_of(torch.randn(5)))
    for chunk, message in ((b"".join(chunks) + b"x", "'t0'.* 20 .* 21"), (b"", "'t0'.* 20 .* 0 ")):
        assembler = FrameAssembler()
        assembler.begin(header)
        with pytest.raises(CorruptDataError, match="micro-batch 2 of step 5"):
            assembler.begin(header)
        with pytest.raises(CorruptDataError, match=message):
            assembler.add(chunk)


@pytest.mark.parametrize("kind", [0, 8, 1000])
def test_unknown_kind_is_corrupt(kind: int) -> None:
    with pytest.raises(CorruptDataError, match=f"kind {kind}"):
        FrameAssembler().begin(FrameHeader(kind=kind))  # type: ignore[arg-type]


def header_of(
    shape: Sequence[int],
    byte_length: int,
    codec: int = CODEC_FP32,
    data_type: int = DATA_TYPE_FLOAT32,
) -> FrameHeader:
    tensor = TensorHeader(
        name="x",
        data_type=data_type,  # type: ignore[arg-type]
        codec=codec,  # type: ignore[arg-type]
        shape=shape,
        byte_length=byte_length,
    )
    return FrameHeader(kind=FRAME_KIND_FORWARD, tensors=[tensor])


@pytest.mark.parametrize(
    ("data_type", "codec"),
    [(0, 1), (8, 1), (1, 0), (1, 5), (1, 99), (DATA_TYPE_INT32, CODEC_BF16)],
)
def test_unknown_type_or_codec_is_corrupt(data_type: int, codec: int) -> None:
    with pytest.raises(CorruptDataError, match=f"'x'.* {data_type} and codec {codec}"):
        FrameAssembler().begin(header_of([2], 4, codec, data_type))


@pytest.mark.parametrize(
    ("codec", "shape", "byte_length"),
    [
        (CODEC_FP32, [2], 4),
        (CODEC_FP32, [2], 12),
        (CODEC_FP32, [-1, -1], 4),
        (CODEC_FP32, [-2], 8),
        (CODEC_FP32, [0], 4),
        (CODEC_FP32, [0, 2**62, 2**62], 0),
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
def test_length_that_contradicts_the_shape_is_corrupt(
    codec: Codec, shape: list[int], byte_length: int
) -> None:
    with pytest.raises(CorruptDataError, match="'x' of shape"):
        FrameAssembler().begin(header_of(shape, byte_length, codec))


def test_tensor_name_that_occurs_twice_is_corrupt() -> None:
    header = header_of([1], 4)
    header.tensors.append(header.tensors[0])
    with pytest.raises(CorruptDataError, match="x, x"):
        FrameAssembler().begin(header)


# Rows of int4 that are narrower than a tile of 32 values take the memory of whole tiles when they are decoded.
@pytest.mark.parametrize(
    ("header", "num_bytes", "limit"),
    [
        (header_of([1 << 20], 1 << 22), 1 << 22, (1 << 22) - 1),
        (header_of([2**40], 2**42), 2**42, None),
        (header_of([1, 1 << 16], (1 << 16) + 4, CODEC_INT8), 1 << 18, 1 << 17),
        (header_of([1 << 16, 1], 18 << 16, CODEC_INT4), 1 << 23, 1 << 20),
    ],
    ids=["fp32", "default", "int8", "int4"],
)
def test_frame_over_the_limit_is_refused_before_allocation(
    monkeypatch: pytest.MonkeyPatch, header: FrameHeader, num_bytes: int, limit: int | None
) -> None:
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: pytest.fail("allocated"))
    given_limits = () if limit is None else (dict.fromkeys(FrameKind, limit),)
    with pytest.raises(InvalidInputError, match=rf" {num_bytes} .* {limit or 1 << 30}\b"):
        FrameAssembler(*given_limits).begin(header)


def test_kinds_have_limits_that_count_all_tensors() -> None:
    assembler = FrameAssembler({FrameKind.FORWARD: 8, FrameKind.BACKWARD: 7})
    header = header_of([1], 4)
    header.tensors.extend(header_of([1], 4).tensors)
    header.tensors[1].name = "y"
    assert assembler.begin(header) is None
    header.kind = FRAME_KIND_BACKWARD
    with pytest.raises(InvalidInputError, match="BACKWARD .* 8 .* 7:"):
        FrameAssembler({FrameKind.FORWARD: 8, FrameKind.BACKWARD: 7}).begin(header)


@pytest.mark.parametrize("shape", [[1] * 5000, [0]])
def test_header_that_would_take_memory_itself_is_refused(shape: list[int]) -> None:
    header = header_of(shape, 4 * shape[0])
    if not shape[0]:
        header.tensors.extend(
            TensorHeader(name=str(n), data_type=DATA_TYPE_FLOAT32, codec=CODEC_FP32, shape=[0])
            for n in range(1000)
        )
    with pytest.raises(InvalidInputError, match=" 4096"):
        FrameAssembler().begin(header)


_tensor_headers = st.builds(
    TensorHeader,
    name=st.sampled_from(["a", "b", ""]),
    data_type=st.integers(0, 9),
    codec=st.integers(0, 2),
    shape=st.lists(st.integers(-2, 3) | st.integers(-(2**63), 2**63 - 1), max_size=4),
    byte_length=st.integers(0, 40) | st.integers(0, 2**64 - 1),
    crc32=st.integers(0, 2**32 - 1),
)
_headers = st.builds(
    FrameHeader,
    kind=st.integers(-1, 6),
    step_index=st.integers(0, 3),
    micro_batch=st.integers(0, 3),
    tensors=st.lists(_tensor_headers, max_size=3),
)


@given(st.lists(_headers | st.binary(max_size=40), max_size=6))
def test_random_headers_and_chunks_raise_only_errors_of_collapipe(
    parts: list[FrameHeader | bytes],
) -> None:
    assembler = FrameAssembler(dict.fromkeys(FrameKind, 1 << 16))
    for part in parts:
        try:
            frame = assembler.add(part) if isinstance(part, bytes) else assembler.begin(part)
        except CollapipeError:
            continue
        assert frame is None or frame.byte_length <= 1 << 16


@given(st.data())
def test_corrupt_frame_is_never_decoded(data: st.DataObject) -> None:
    sent = frame_of(torch.arange(3.0), torch.tensor([True, False]))
    header, chunks = encode_frame(sent)
    stream = list(chunks)
    which = data.draw(st.integers(0, len(stream) - 1))
    chunk = stream[which]
    flipped = bytearray(chunk)
    flipped[data.draw(st.integers(0, len(chunk) - 1))] ^= data.draw(st.integers(1, 255))
    damages = [[bytes(flipped)], [], [chunk, chunk], [chunk[:-1]], [chunk + b"x"]]
    stream[which : which + 1] = data.draw(st.sampled_from(damages))
    assembler = FrameAssembler()
    arrived = assembler.begin(header)
    try:
        for chunk in stream:
            arrived = assembler.add(chunk)
    except CorruptDataError:
        return
    assert arrived is None
