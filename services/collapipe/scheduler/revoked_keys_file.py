"""Keeps the scheduler's list of revoked keys as new as a file."""

import logging
import os
import threading
from pathlib import Path

from collapipe.certificates.private_files import read_required
from collapipe.certificates.revoked_keys import parse_list
from collapipe.errors import CollapipeError
from collapipe.rpc import Security

logger = logging.getLogger(__name__)

_CHECK_SECONDS = 2.0
_REMEDY = "name the file revoked.pb of the authority, which `collapipe certs revoke` writes"


class RevokedKeysFile:
    """Reads a list of revoked keys now, and again whenever its file changes.

    A file that is missing or wrong at first is an error. Later, it only causes a warning, and the last good list remains.

    Raises:
        InvalidInputError: The file is missing, or has no list.
        NotPermittedError: The authority has not signed the list.
    """

    def __init__(self, path: Path, security: Security) -> None:
        self._path = path
        self._security = security
        self._closed = threading.Event()
        self._last = self._changed_at()
        self._read()
        threading.Thread(target=self._watch, name="revoked keys", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(_CHECK_SECONDS):
            changed_at = self._changed_at()
            if changed_at != self._last:
                self._last = changed_at
                try:
                    self._read()
                except CollapipeError as error:
                    logger.warning("the last list of revoked keys stays in use: %s", error)

    def _read(self) -> None:
        signed = read_required(self._path, parse_list, _REMEDY)
        self._security.learn_revoked(signed)
        revoked = self._security.revoked
        if revoked.signed == signed:
            logger.info("list %d of revoked keys is in use", revoked.number)
        else:
            logger.warning(
                "%s is older than list %d, which stays in use", self._path, revoked.number
            )

    def _changed_at(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns
