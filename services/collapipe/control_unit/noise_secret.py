"""The secret of a job and a cluster from which the noise of its private updates is made."""

import secrets
from pathlib import Path

from collapipe.certificates.private_files import OWNER_ONLY, make_folder, write_file

_BYTES = 32


def noise_secret(directory: Path) -> bytes:
    """Returns the secret, which stays the same for all attempts at the job. The first call makes it.

    If it is lost, repeated rounds get other noise. They reveal no more than the account of the job says, because it counts
    every attempt at a round.

    Args:
        directory: Directory of the job on the control unit's disk.
    """
    path = directory / "noise-secret"
    if not path.exists():
        make_folder(directory)
        write_file(path, secrets.token_bytes(_BYTES), OWNER_ONLY)
    return path.read_bytes()
