import itertools
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from collapipe.errors import CollapipeError, CorruptDataError, InvalidInputError
from collapipe.tensors import CHUNK_BYTES, Frame, FrameAssembler, FrameKind, encode_frame
from collapipe.v1.stage_pb2 import FRAME_KIND_BACKWARD, FRAME_KIND_FORWARD, FrameHeader
from collapipe.v1.tensor_pb2 import CODEC_FP32, DATA_TYPE_FLOAT32, TensorHeader

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.bool,
]


def frame_of(*tensors: Tensor, kind: FrameKind = FrameKind.FORWARD) -> Frame:
    return Frame(kind, 5, 2, {f"t{number}": tensor for number, tensor in enumerate(tensors)}, 3)


def over_the_wire(frame: Frame, assembler: FrameAssembler | None = None) -> Frame | None:
    """Encodes and decodes a frame, and serialises the header in between."""
    assembler = assembler or FrameAssembler()
    header, chunks = encode_frame(frame)
    arrived = assembler.begin(FrameHeader.FromString(header.SerializeToString()))
    for chunk in chunks:
        assert arrived is None, "the frame was complete before its last chunk"
        arrived = assembler.add(chunk)
    return arrived


def assert_same(arrived: Frame | None, sent: Frame) -> None:
    assert arrived is not None
    assert arrived.with_tensors({}) == sent.with_tensors({})
    assert list(arrived.tensors) == list(sent.tensors)
    for name, tensor in sent.tensors.items():
        other = arrived.tensors[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
        raw = tensor.contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(other.reshape(-1).view(torch.uint8), raw)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 5)], ids=str)
def test_tensor_arrives_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = frame_of((torch.randn(shape) * 50).to(dtype))
    assert_same(over_the_wire(sent), sent)


def test_nan_and_negative_zero_keep_their_bits() -> None:
    sent = frame_of(torch.tensor([float("nan"), -0.0, float("-inf"), 1e-45]))
    arrived = over_the_wire(sent)
    assert_same(arrived, sent)


def test_tensor_that_is_not_contiguous_arrives_in_its_own_order() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).T
    arrived = over_the_wire(frame_of(tensor))
    assert arrived is not None
    assert torch.equal(arrived.tensors["t0"], tensor)


def test_empty_tensors_among_others_arrive() -> None:
    empty, full = torch.empty(0, 4), torch.randn(3)
    for tensors in itertools.product([empty, full], repeat=3):
        sent = frame_of(*tensors)
        assert_same(over_the_wire(sent), sent)


def test_frame_without_tensors_is_complete_at_once() -> None:
    assert_same(over_the_wire(frame_of()), frame_of())


@pytest.mark.parametrize("kind", list(FrameKind))
def test_kind_arrives_and_has_its_direction(kind: FrameKind) -> None:
    arrived = over_the_wire(frame_of(torch.zeros(1), kind=kind))
    assert arrived is not None
    assert arrived.kind is kind
    backward, labels = (FrameKind.BACKWARD, FrameKind.PREDICTION), (FrameKind.LABELS,)
    assert kind.towards_head == (kind not in backward + labels)


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_chunks_are_full_and_contain_bytes_of_one_tensor(extra: int) -> None:
    sizes = [CHUNK_BYTES + extra, 7]
    sent = frame_of(*(torch.arange(size).to(torch.int8) for size in sizes))
    _, chunks = encode_frame(sent)
    expected = [CHUNK_BYTES + extra] if extra < 1 else [CHUNK_BYTES, extra]
    assert [len(chunk) for chunk in chunks] == [*expected, 7]
    assert_same(over_the_wire(sent), sent)
    assert sent.byte_length == sum(sizes)


def test_assembler_decodes_one_frame_after_the_other() -> None:
    assembler = FrameAssembler()
    for size in (3, 1, 5):
        sent = frame_of(torch.randn(size))
        assert_same(over_the_wire(sent, assembler), sent)


def test_element_type_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"'t0' has type torch.float64.*torch.float32"):
        encode_frame(frame_of(torch.zeros(1, dtype=torch.float64)))


# --- corrupt headers and data


@pytest.mark.parametrize("position", [0, 9, 19])
def test_flipped_bit_is_corrupt(position: int) -> None:
    header, chunks = encode_frame(frame_of(torch.randn(5)))
    data = bytearray(b"".join(chunks))
    data[position] ^= 0x10
    assembler = FrameAssembler()
    assembler.begin(header)
    with pytest.raises(CorruptDataError, match=r"'t0' arrived with CRC-32 [0-9a-f]{8} instead of"):
        assembler.add(bytes(data))


def test_frame_that_begins_before_the_last_is_complete_is_corrupt() -> None:
    assembler = FrameAssembler()
    header, _ = encode_frame(frame_of(torch.randn(5)))
    assembler.begin(header)
    with pytest.raises(CorruptDataError, match="micro-batch 2 of step 5 lacked bytes"):
        assembler.begin(header)


def test_more_bytes_than_announced_are_corrupt() -> None:
    assembler = FrameAssembler()
    header, chunks = encode_frame(frame_of(torch.randn(5)))
    assembler.begin(header)
    with pytest.raises(CorruptDataError, match="announced with 20 bytes.* makes it 21"):
        assembler.add(b"".join(chunks) + b"x")


def test_empty_chunk_is_corrupt() -> None:
    assembler = FrameAssembler()
    assembler.begin(encode_frame(frame_of(torch.randn(5)))[0])
    with pytest.raises(CorruptDataError, match="a chunk of 0 "):
        assembler.add(b"")


def test_chunk_outside_a_frame_is_corrupt() -> None:
    with pytest.raises(CorruptDataError, match="chunk of 3 bytes arrived outside"):
        FrameAssembler().add(b"abc")


@pytest.mark.parametrize("kind", [0, 8, 1000])
def test_unknown_kind_is_corrupt(kind: int) -> None:
    with pytest.raises(CorruptDataError, match=f"unknown kind {kind}"):
        FrameAssembler().begin(FrameHeader(kind=kind))  # type: ignore[arg-type]


@pytest.mark.parametrize(("data_type", "codec"), [(0, 1), (8, 1), (1, 0), (1, 9)])
def test_unknown_type_or_codec_is_corrupt(data_type: int, codec: int) -> None:
    tensor = TensorHeader(name="x", data_type=data_type, codec=codec, byte_length=4)  # type: ignore[arg-type]
    with pytest.raises(CorruptDataError, match=f"'x' has data type {data_type} and codec {codec}"):
        FrameAssembler().begin(FrameHeader(kind=FRAME_KIND_FORWARD, tensors=[tensor]))


def raw_header(shape: list[int], byte_length: int) -> FrameHeader:
    tensor = TensorHeader(
        name="x",
        data_type=DATA_TYPE_FLOAT32,
        codec=CODEC_FP32,
        shape=shape,
        byte_length=byte_length,
    )
    return FrameHeader(kind=FRAME_KIND_FORWARD, tensors=[tensor])


@pytest.mark.parametrize(
    ("shape", "byte_length"),
    [([2], 4), ([2], 12), ([-1, -1], 4), ([-2], 8), ([0], 4), ([0, 2**62, 2**62], 0)],
)
def test_shape_that_contradicts_the_bytes_is_corrupt(shape: list[int], byte_length: int) -> None:
    with pytest.raises(CorruptDataError, match="'x' of shape"):
        FrameAssembler().begin(raw_header(shape, byte_length))


def test_tensor_name_that_occurs_twice_is_corrupt() -> None:
    header = raw_header([1], 4)
    header.tensors.append(header.tensors[0])
    with pytest.raises(CorruptDataError, match="twice: x, x"):
        FrameAssembler().begin(header)


def test_frame_over_the_limit_is_refused_before_allocation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    header = raw_header([1 << 20], 1 << 22)
    header.tensors.append(TensorHeader())
    header.tensors[1].CopyFrom(header.tensors[0])
    header.tensors[1].name = "y"
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: pytest.fail("allocated"))
    with pytest.raises(InvalidInputError, match=f"{1 << 23} bytes exceeds the limit of 8388607"):
        FrameAssembler(dict.fromkeys(FrameKind, (1 << 23) - 1)).begin(header)


def test_very_large_frame_is_refused_by_the_default_limit() -> None:
    with pytest.raises(InvalidInputError, match="exceeds the limit of 1073741824"):
        FrameAssembler().begin(raw_header([2**40], 2**42))


def test_kinds_have_limits_of_their_own() -> None:
    assembler = FrameAssembler({FrameKind.FORWARD: 8, FrameKind.BACKWARD: 4})
    assert assembler.begin(raw_header([2], 8)) is None
    header = raw_header([2], 8)
    header.kind = FRAME_KIND_BACKWARD
    with pytest.raises(InvalidInputError, match="BACKWARD with 8 bytes exceeds the limit of 4: "):
        FrameAssembler({FrameKind.FORWARD: 8, FrameKind.BACKWARD: 4}).begin(header)


@pytest.mark.parametrize("shape", [[1] * 5000, [0]])
def test_header_that_would_take_memory_itself_is_refused(shape: list[int]) -> None:
    header = raw_header(shape, 4 * shape[0])
    if not shape[0]:
        header.tensors.extend(
            TensorHeader(name=str(n), data_type=DATA_TYPE_FLOAT32, codec=CODEC_FP32, shape=[0])
            for n in range(1000)
        )
    with pytest.raises(InvalidInputError, match="header of a frame has .* the limit of 4096"):
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
    how = data.draw(st.sampled_from(["flip", "drop", "twice", "cut", "grow"]))
    if how == "flip":
        position = data.draw(st.integers(0, len(stream[which]) - 1))
        garbled = bytearray(stream[which])
        garbled[position] ^= data.draw(st.integers(1, 255))
        stream[which] = bytes(garbled)
    elif how == "drop":
        del stream[which]
    elif how == "twice":
        stream.insert(which, stream[which])
    else:
        stream[which] = stream[which][:-1] if how == "cut" else stream[which] + struct.pack("x")
    assembler = FrameAssembler()
    arrived = assembler.begin(header)
    try:
        for chunk in stream:
            arrived = assembler.add(chunk)
    except CorruptDataError:
        return
    assert arrived is None
