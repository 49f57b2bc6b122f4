"""The secret of a job and a cluster from which the noise of its private updates is made."""

import secrets
from pathlib import Path

from collapipe.certificates.private_files import OWNER_ONLY, replace_file

_BYTES = 32


def noise_secret(directory: Path) -> bytes:
    """Returns the secret, which stays the same for all attempts at the job. The first call makes it.

    If it is lost or cut, a new one is made, and repeated rounds get other noise. They reveal no more than the account of the
    job says, because it counts every attempt at a round. Noise from a cut secret could be guessed.

    Args:
        directory: Directory of the job on the control unit's disk.
    """
    path = directory / "noise-secret"
    secret = path.read_bytes() if path.exists() else b""
    if len(secret) != _BYTES:
        directory.mkdir(parents=True, exist_ok=True)
        secret = secrets.token_bytes(_BYTES)
        replace_file(path, secret, OWNER_ONLY)
    return secret
