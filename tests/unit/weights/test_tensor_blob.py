import contextlib
import hashlib
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from collapipe.errors import CollapipeError, CorruptDataError, InvalidInputError
from collapipe.weights.tensor_blob import TensorBlob, load_tensors, read_layout

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool]


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    named = {f"t.{dtype}": (torch.randn(3, 2) * 9).to(dtype) for dtype in TYPES}
    return named | {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "odd bytes": torch.tensor([True, False, True]),
        'a "name" of ünusual letters': torch.zeros(1),
    }


def bytes_of(blob: TensorBlob, offset: int = 0) -> bytes:
    return b"".join(blob.read(offset))


def test_tensors_come_back_here_and_in_the_safetensors_library(tensors: dict[str, Tensor]) -> None:
    blob = TensorBlob(tensors)
    data = bytes_of(blob)
    for found in (load(data), load_tensors(data)):
        assert found.keys() == tensors.keys()
        for name, tensor in found.items():
            assert tensor.dtype == tensors[name].dtype
            assert torch.equal(tensor, tensors[name])
    assert blob.digest == hashlib.sha256(data).hexdigest() == TensorBlob(found).digest
    assert blob.total_bytes == len(data)
    assert load_tensors(bytes_of(TensorBlob({}))) == {}


def test_digest_depends_on_values_and_not_on_the_order_of_names() -> None:
    one, two = torch.zeros(2), torch.ones(3)
    digest = TensorBlob({"a": one, "b": two}).digest
    assert TensorBlob({"b": two, "a": one}).digest == digest
    assert TensorBlob({"a": one, "b": two + 1}).digest != digest
    assert TensorBlob({"a": one, "c": two}).digest != digest


def test_parameters_are_stored_without_their_gradient() -> None:
    parameter = torch.nn.Parameter(torch.randn(4))
    assert torch.equal(load(bytes_of(TensorBlob({"p": parameter})))["p"], parameter.detach())


def test_reading_from_any_offset_gives_the_rest(tensors: dict[str, Tensor]) -> None:
    blob = TensorBlob(tensors)
    data = bytes_of(blob)
    for offset in range(len(data) + 1):
        assert bytes_of(blob, offset) == data[offset:]


def test_type_that_is_not_stored_is_refused_by_name() -> None:
    with pytest.raises(InvalidInputError, match=r"'x' .*float64.*float32"):
        TensorBlob({"x": torch.zeros(1, dtype=torch.float64)})


@given(st.binary(max_size=60))
def test_random_bytes_raise_only_errors_of_collapipe(data: bytes) -> None:
    with contextlib.suppress(CollapipeError):
        load_tensors(data)


def test_header_whose_tensors_overlap_or_leave_a_gap_is_corrupt() -> None:
    data = save({"first": torch.zeros(4), "second": torch.ones(4)})
    assert len(read_layout(io.BytesIO(data)).tensors) == 2
    for begin, end in ((12, 28), (20, 36)):
        other = data.replace(b"[16,32]", f"[{begin},{end}]".encode())
        with pytest.raises(CorruptDataError, match="'second'"):
            read_layout(io.BytesIO(other))


def test_header_that_is_nested_too_deeply_is_corrupt() -> None:
    header = b"[" * 100_000
    with pytest.raises(CorruptDataError, match="100000"):
        read_layout(io.BytesIO(len(header).to_bytes(8, "little") + header))


@pytest.mark.parametrize("length", [0, 7, 40, -1])
def test_truncated_bytes_are_corrupt(length: int) -> None:
    cut = save({"x": torch.randn(8)})[:length]
    with pytest.raises(CorruptDataError, match=f"^{len(cut)} bytes"):
        load_tensors(cut)
