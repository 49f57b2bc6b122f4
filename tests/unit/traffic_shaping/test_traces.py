from pathlib import Path

import pytest

from collapipe.errors import InvalidInputError
from collapipe.traffic_shaping.shaper_process.traces import TRACES, named_trace, read_trace


def test_trace_of_the_package_becomes_slow_and_recovers() -> None:
    assert list(TRACES) == ["walk-away"]
    rates = [step.in_direction("up").rate_bps or 0 for step in named_trace("walk-away").steps]
    assert rates[0] == rates[-1] == max(rates) > 5 * min(rates)


def test_csv_and_toml_describe_the_same_trace(tmp_path: Path) -> None:
    table, toml = tmp_path / "steps.csv", tmp_path / "steps.toml"
    table.write_text("# a comment\nat_seconds,rate_bps,profile\n0,1e6,\n5,,4g\n")
    toml.write_text('steps = [{at_seconds = 0, rate_bps = 1e6}, {at_seconds = 5, profile = "4g"}]')
    assert read_trace(table) == read_trace(toml)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.toml", "steps = []", "steps: .*1"),
        ("x.toml", "steps = [{at_seconds = 3}]", " 3.* 0"),
        ("x.csv", "at_seconds,rate_bps\n0,1e6\n5,2e6\n5,3e6\n", " 0, 5, 5"),
        ("x.csv", "at_seconds,rate_bps\n0,fast\n", "rate_bps"),
        ("x.toml", "steps = ", "x.toml"),
        pytest.param("x.toml", "steps = " + "[" * 100_000, "x.toml", id="deep"),
    ],
)
def test_file_that_is_not_a_trace_is_refused_with_the_mistake(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(InvalidInputError, match=message):
        read_trace(file)
