import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from collapipe.codec_table import UploadCodecName
from collapipe.errors import CorruptDataError
from collapipe.weights.delta_codecs import DELTA_CODECS, TopKCodec, decode_delta, encode_delta
from collapipe.weights.tensor_blob import TensorBlob, load_tensors

LOSSY: list[UploadCodecName] = ["bf16", "int8", "top_k"]
Tensors = dict[str, Tensor]


def unit(seed: int = 0) -> Tensors:
    torch.manual_seed(seed)
    return {
        "attention.weight": torch.randn(70, 130) / 10,
        "attention.bias": torch.randn(130) / 10,
        "scalar": torch.tensor(0.5),
        "empty": torch.empty(0, 3),
        "half": torch.randn(5).half(),
        "positions": torch.arange(9),
    }


def trained(base: Tensors, seed: int = 1, by: float = 1e-3) -> Tensors:
    """Returns weights that differ from the base in every value of a floating-point type."""
    torch.manual_seed(seed)
    return {
        name: tensor + (by * torch.randn(tensor.shape)).to(tensor.dtype)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in base.items()
    }


def over_the_wire(tensors: Tensors) -> Tensors:
    return load_tensors(b"".join(TensorBlob(tensors).read()))


def assert_same_bits(left: Tensors, right: Tensors) -> None:
    assert {n: (t.dtype, t.shape) for n, t in left.items()} == {
        n: (t.dtype, t.shape) for n, t in right.items()
    }
    assert TensorBlob(left).digest == TensorBlob(right).digest


@pytest.mark.parametrize("codec", ["fp32", *LOSSY])
def test_receiver_decodes_the_bits_that_the_sender_expects(codec: UploadCodecName) -> None:
    base = unit()
    residual: Tensors = {}
    for round_index in range(3):
        encoded = encode_delta(codec, trained(base, round_index), base, residual)
        assert_same_bits(decode_delta(over_the_wire(encoded.tensors), base), encoded.weights)
        assert encoded.weights.keys() == base.keys()
        base, residual = encoded.weights, encoded.residual


@pytest.mark.parametrize("codec", LOSSY)
def test_encoding_has_the_announced_size_whatever_default_type_another_job_sets_for_a_moment(
    codec: UploadCodecName,
) -> None:
    base, new = unit(), trained(unit())
    expected = encode_delta(codec, new, base, {})
    data = expected.tensors[f"attention.weight//{codec}"]
    num_bytes = {"bf16": 18200, "int8": 9380, "top_k": 3 * 116}[codec]
    assert data.nbytes == DELTA_CODECS[codec].encoded_bytes((70, 130)) == num_bytes
    torch.set_default_dtype(torch.bfloat16)
    try:
        encoded = encode_delta(codec, new, base, {})
        arrived = decode_delta(over_the_wire(encoded.tensors), base)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same_bits(encoded.tensors, expected.tensors)
    assert_same_bits(arrived, expected.weights)
    assert_same_bits(encoded.residual, expected.residual)


@pytest.mark.parametrize("codec", ["fp32", *LOSSY])
def test_only_what_has_changed_is_sent(codec: UploadCodecName) -> None:
    base = unit()
    new = base | {"attention.bias": base["attention.bias"] + 1, "positions": torch.arange(9) + 1}
    sent = encode_delta(codec, new, base, {}).tensors
    suffix = "" if codec == "fp32" else f"//{codec}"
    assert set(sent) == {f"attention.bias{suffix}", "positions"}


def test_fp32_is_lossless_and_sends_what_an_earlier_codec_has_lost() -> None:
    base, new = unit(), trained(unit())
    encoded = encode_delta("fp32", new, base, {})
    assert_same_bits(encoded.weights, new)
    assert not encoded.residual
    lossy = encode_delta("int8", new, base, {})
    flushed = encode_delta("fp32", lossy.weights, lossy.weights, lossy.residual)
    for name, tensor in flushed.weights.items():
        assert torch.allclose(tensor, new[name], rtol=0, atol=1e-7)


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_what_one_round_loses_arrives_in_the_next_ones(codec: UploadCodecName) -> None:
    start = unit()["attention.weight"]
    base, total = {"w": start}, torch.zeros_like(start)
    residual: Tensors = {}
    torch.manual_seed(3)
    for _ in range(20):
        change = 1e-2 * torch.randn(start.shape)
        total += change
        encoded = encode_delta(codec, {"w": base["w"] + change}, base, residual)
        base, residual = encoded.weights, encoded.residual
    without_feedback = 20**0.5 * encoded.residual["w"].norm()
    lost = (base["w"] - start - total).norm()
    assert lost < without_feedback / 2
    assert torch.allclose(base["w"] + residual["w"], start + total, atol=1e-6)


def test_top_k_sends_every_value_in_the_end() -> None:
    change = torch.randn(2, 4096, generator=torch.Generator().manual_seed(0)).sign()
    base, residual = {"w": torch.zeros(2, 4096)}, Tensors()
    touched = torch.zeros(2, 4096, dtype=torch.bool)
    for _ in range(80):
        encoded = encode_delta("top_k", {"w": base["w"] + change}, base, residual)
        touched |= encoded.weights["w"] != base["w"]
        base, residual = encoded.weights, encoded.residual
    assert touched.all()
    assert torch.equal(base["w"].sign(), change)


@given(st.integers(0, 2**31), st.integers(30, 9000), st.floats(1e-6, 1e6))
def test_top_k_keeps_the_largest_values_with_two_magnitudes_a_chunk(
    seed: int, length: int, magnitude: float
) -> None:
    sent = torch.randn(length, generator=torch.Generator().manual_seed(seed)) * magnitude
    codec = TopKCodec()
    data = codec.encode(sent)
    assert data.nbytes == codec.encoded_bytes((length,))
    arrived = codec.decode(data, (length,))
    for start in range(0, length, 4096):
        before, after = sent[start : start + 4096], arrived[start : start + 4096]
        kept = after != 0
        assert kept.sum() == min(64, len(before))
        assert torch.equal(after.sign()[kept], before.sign()[kept])
        assert before[kept].abs().min() >= before.abs()[~kept].amax() if not kept.all() else True
        assert len(set(after[kept].abs().tolist())) <= 2
        # Means are the best choice of two magnitudes, so the encoding never adds to the error.
        assert (after - before).norm() < before.norm() * (1 + 2**-8)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_value_that_is_not_finite_stays_so(codec: UploadCodecName, bad: float) -> None:
    base, new = unit(), trained(unit())
    new["attention.weight"][3, 5] = bad
    arrived = encode_delta(codec, new, base, {}).weights["attention.weight"]
    assert not arrived[3, 5].isfinite()
    assert arrived[40:].isfinite().all()


@pytest.mark.parametrize("codec", LOSSY)
def test_tensors_from_a_file_are_decoded_at_any_address(
    tmp_path: Path, codec: UploadCodecName
) -> None:
    base = unit()
    encoded = encode_delta(codec, trained(base), base, {})
    # One byte before them shifts all others to odd addresses.
    shifted = {"": torch.zeros(1, dtype=torch.uint8)} | encoded.tensors
    (tmp_path / "delta").write_bytes(b"".join(TensorBlob(shifted).read()))
    with safe_open(tmp_path / "delta", "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in encoded.tensors}
        assert_same_bits(decode_delta(tensors, base), encoded.weights)


# --- garbage

BYTES = torch.zeros(9, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"other": BYTES}, "'other'"),
        ({"other//int8": BYTES}, "'other//int8', but 'other'"),
        ({"//int8": BYTES}, "'//int8', but ''"),
        ({"scalar": torch.tensor(1.0), "scalar//bf16": BYTES}, "'scalar' is sent twice"),
        ({"attention.bias//zip": BYTES}, "bias//zip', whose codec"),
        ({"attention.bias//fp32": BYTES}, "bias//fp32', whose codec"),
        ({"half//bf16": BYTES}, "half//bf16', .*torch.float16"),
        ({"attention.bias//int8": BYTES}, r"\[9\] .*uint8 .*\[134\]"),
        ({"attention.bias//int8": torch.zeros(134)}, r"float32 .*\[134\] .*uint8"),
        ({"attention.bias": torch.zeros(129)}, r"\[129\] .*\[130\]"),
        ({"positions": torch.zeros(9)}, "float32 .*int64"),
        ({"attention.bias//top_k": torch.zeros(116, dtype=torch.uint8)}, "top_k"),
    ],
)
def test_garbage_is_refused(tensors: Tensors, named: str) -> None:
    with pytest.raises(CorruptDataError, match=named):
        decode_delta(tensors, unit())


@given(st.sampled_from(LOSSY), st.binary(min_size=348, max_size=348))
def test_random_bytes_decode_or_are_refused(codec: UploadCodecName, data: bytes) -> None:
    shape = {"bf16": (174,), "int8": (4, 83), "top_k": (70, 130)}[codec]
    tensors = {f"w//{codec}": torch.frombuffer(bytearray(data), dtype=torch.uint8)}
    try:
        decoded = decode_delta(tensors, {"w": torch.zeros(shape)})
    except CorruptDataError:
        assert codec == "top_k"
    else:
        assert decoded["w"].shape == shape
