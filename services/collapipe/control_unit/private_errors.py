"""Errors about rows of a private job, which stay in the log of the control unit."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from collapipe.errors import InvalidInputError
from collapipe.job import JobConfig

_log = logging.getLogger(__name__)


@contextmanager
def private_errors(job: JobConfig) -> Iterator[None]:
    """Reads rows. If the job has differential privacy, an error about them is logged, and the raised one has no details of rows."""
    try:
        yield
    except InvalidInputError as error:
        if not job.privacy.is_on:
            raise
        _log.error("%s", error)
        raise InvalidInputError(
            "the data of this cluster cannot be used: look into the log of its control unit, which says why. The error has no details, "
            "because the job has differential privacy"
        ) from None
