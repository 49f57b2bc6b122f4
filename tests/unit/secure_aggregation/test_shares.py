"""Shares of secrets, and their encryption."""

import itertools
import secrets

import pytest

from collapipe.errors import CorruptDataError
from collapipe.secure_aggregation.shares import decrypt, encrypt, join_secret, split_secret

HOLDERS = [0, 2, 3, 7]
SECRET = secrets.token_bytes(16)


def test_any_three_of_four_shares_give_the_secret_and_two_do_not() -> None:
    shares = split_secret(SECRET, 3, HOLDERS)
    for count, is_enough in ((2, False), (3, True), (4, True)):
        for holders in itertools.combinations(HOLDERS, count):
            joined = join_secret({holder: shares[holder] for holder in holders}, HOLDERS)
            assert (joined == SECRET) is is_enough


def test_shares_can_be_decrypted_only_unchanged_and_in_their_context() -> None:
    key, shares = secrets.token_bytes(32), secrets.token_bytes(32)
    encrypted = encrypt(key, shares, b"keys of three clusters")
    assert shares[:16] not in encrypted
    assert decrypt(key, encrypted, b"keys of three clusters", 1) == shares
    changed = bytes([encrypted[0] ^ 1]) + encrypted[1:]
    for ciphertext, context in ((changed, b"keys of three clusters"), (encrypted, b"other keys")):
        with pytest.raises(CorruptDataError, match="cluster 1"):
            decrypt(key, ciphertext, context, 1)
