"""Unusable certificate files are refused at the start instead of at every handshake."""

from pathlib import Path

import pytest

from collapipe.errors import InvalidInputError
from collapipe.rpc import Security

from .authorities import Authority


def test_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    one, other = authority.security("device-agent:one"), authority.security("device-agent:other")
    with pytest.raises(InvalidInputError, match=r"--tls-key .*other/key\.pem"):
        Security.of(False, one.ca, one.certificate, other.key)


def test_authority_that_is_no_certificate_is_refused(tmp_path: Path) -> None:
    one = Authority(tmp_path).security("device-agent:one")
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("not a certificate")
    with pytest.raises(InvalidInputError, match=r"--tls-ca .*garbage\.pem"):
        Security.of(False, garbage, one.certificate, one.key)
