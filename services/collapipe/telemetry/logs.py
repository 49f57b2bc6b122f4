"""Logs of a service, one line per record: text for people or JSON for log collectors.

In text, only a traceback has further lines, which are indented.
"""

import json
import logging
import sys
import time
from typing import Any, Literal

from collapipe.printable import indented, printable

LogFormat = Literal["text", "json"]

_EXTRA_KEYS = ("code", "job_id", "host_ids")
"""What the records of failures and recoveries of a job have beyond their text."""


class _TextFormatter(logging.Formatter):
    """Messages contain words of other hosts, which must not look like records of their own."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return indented(f"\n{super().formatException(ei)}")[1:]


class _JsonFormatter(logging.Formatter):
    def __init__(self, service: str, host_id: str) -> None:
        super().__init__()
        self._fixed = {"service": service, "host_id": host_id}

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.exc_info:
            message = f"{message}\n{self.formatException(record.exc_info)}"
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": message,
        }
        line |= {key: getattr(record, key) for key in _EXTRA_KEYS if hasattr(record, key)}
        return json.dumps(line | self._fixed)


def configure_logging(log_format: LogFormat, service: str, host_id: str) -> None:
    """Sends every record from INFO on to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(_JsonFormatter(service, host_id))
    else:
        text = f"%(asctime)s %(levelname)-7s {host_id} %(name)s: %(message)s"
        handler.setFormatter(_TextFormatter(text))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)
