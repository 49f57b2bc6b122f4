import json
import logging
import re
from collections.abc import Iterator

import pytest

from collapipe.telemetry.logs import configure_logging


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers, root.level = handlers, level


def test_text_is_one_line_with_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("text", "device-agent", "device-1")
    logging.getLogger("collapipe.x").warning("took %d s", 3)
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"[-\d]+ [\d:,]+ WARNING device-1 collapipe\.x: took 3 s\n", err)


def test_words_of_others_begin_no_line_and_command_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging("text", "device-agent", "device-1")
    forged = "2026-01-01 00:00:00,000 INFO    device-1 collapipe.x: all is well"
    words = f"\x1b[2J\n{forged}\u2028{forged}\r{forged}\x85\u202e"
    log = logging.getLogger("collapipe.x")
    log.warning("%s", words)
    try:
        raise ValueError(words)
    except ValueError:
        log.exception("failed: %s", words)
    printed = capsys.readouterr().err
    assert {c for c in printed if not c.isprintable()} == {"\n"}
    begins = [line for line in printed.splitlines() if not line.startswith("    ")]
    assert [" WARNING " in begins[0], " ERROR " in begins[1]] == [True, True]
    assert len(begins) == 2 and "Traceback" in printed and "ValueError" in printed


def test_json_is_one_object_a_line_even_with_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging("json", "device-agent", "device-1")
    try:
        raise ValueError('a "quoted"\nreason')
    except ValueError:
        logging.getLogger("collapipe.x").exception("failed")
    incident = {"code": "HOST_LOST", "job_id": "demo-1", "host_ids": ["device-0"]}
    logging.getLogger("collapipe.y").info("next", extra=incident)
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    common = {"service": "device-agent", "host_id": "device-1"}
    assert first.items() >= {"level": "ERROR", "logger": "collapipe.x", **common}.items()
    assert first["message"].startswith("failed\nTraceback")
    assert 'ValueError: a "quoted"\nreason' in first["message"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert second.items() >= {"message": "next", **incident}.items()


def test_debug_records_and_requests_of_httpx_are_not_logged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging("text", "device-agent", "device-1")
    logging.getLogger("collapipe.x").debug("detail")
    logging.getLogger("httpx").info("GET")
    assert capsys.readouterr().err == ""
