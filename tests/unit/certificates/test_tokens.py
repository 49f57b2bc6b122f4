import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe.certificates import Identity, Role
from collapipe.certificates.tokens import decode_token, encode_token
from collapipe.errors import InvalidInputError
from collapipe.protocol import OURS
from collapipe.v1.enrollment_pb2 import JoinToken

TOKEN = JoinToken(
    secret=bytes(range(32)),
    authority_certificate=bytes(400),
    authority_address="10.0.0.1:7200",
    scheduler_address="10.0.0.1:7100",
    identity="spiffe://collapipe/device-agent/pi/cluster/0",
    protocol=OURS,
)
TEXT = encode_token(TOKEN)


def test_token_is_one_word_with_all_fields() -> None:
    assert decode_token(f" {TEXT}\n") == (TOKEN, Identity(Role.DEVICE_AGENT, "pi"))
    assert TEXT.replace("-", "").replace("_", "").isalnum()
    assert len(TEXT) < 1024


@given(st.integers(0, len(TEXT) - 1))
def test_token_that_was_cut_off_is_refused(length: int) -> None:
    with pytest.raises(InvalidInputError, match="collapipe certs token"):
        decode_token(TEXT[:length])


@given(st.integers(len("collapipe-join-"), len(TEXT) - 2), st.sampled_from("aZ09-_.=é"))
def test_token_that_was_mistyped_is_refused(position: int, character: str) -> None:
    mistyped = TEXT[:position] + character + TEXT[position + 1 :]
    if mistyped != TEXT:
        with pytest.raises(InvalidInputError, match="damaged"):
            decode_token(mistyped)


@pytest.mark.parametrize("text", ["", "hello", "collapipe-join-", "collapipe-join-" + "A" * 9000])
def test_text_that_is_no_token_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="collapipe certs token"):
        decode_token(text)


@pytest.mark.parametrize(
    "identity", ["", "spiffe://collapipe/king/pi", "spiffe://collapipe/a/../b"]
)
def test_token_for_an_invalid_identity_is_refused(identity: str) -> None:
    other = JoinToken()
    other.CopyFrom(TOKEN)
    other.identity = identity
    with pytest.raises(InvalidInputError):
        decode_token(encode_token(other))
