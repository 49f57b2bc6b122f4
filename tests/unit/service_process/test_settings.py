import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import Field

from collapipe.errors import InvalidInputError
from collapipe.rpc import Security
from collapipe.service_process import ServiceSettings, parse_settings


class SomeSettings(ServiceSettings):
    """Settings of an invented service."""

    state_dir: Path = Field(default=Path("state"), description="A directory.")


Parse = Callable[..., SomeSettings]


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Parse:
    """Parses the flags of a command line."""

    def parse(*arguments: str) -> SomeSettings:
        monkeypatch.setattr(sys, "argv", ["tester", *arguments])
        return parse_settings(SomeSettings)

    return parse


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tester.toml"
    path.write_text('threads = 2\nlisten = "file:1"\nhost_id = "file"\n')
    return path


def test_defaults_serve_on_loopback_only(parse: Parse) -> None:
    settings = parse()
    assert (settings.listen, settings.metrics_listen) == ("127.0.0.1:0", "127.0.0.1:0")
    assert (settings.threads, settings.log_format, settings.host_id) == (1, "text", "")


def test_flag_overrides_environment_overrides_file(
    parse: Parse, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLLAPIPE_THREADS", "3")
    monkeypatch.setenv("COLLAPIPE_LISTEN", "environment:1")
    settings = parse("--config", str(config), "--threads", "4")
    assert (settings.threads, settings.listen, settings.host_id) == (4, "environment:1", "file")


@pytest.mark.parametrize("way", ["--config FILE", "--config=FILE", "environment"])
def test_config_file_is_named_by_flag_or_environment(
    parse: Parse, config: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "environment":
        monkeypatch.setenv("COLLAPIPE_CONFIG", str(config))
        settings = parse()
    else:
        settings = parse(*way.replace("FILE", str(config)).split(" "))
    assert settings.host_id == "file"


def test_flags_are_written_with_hyphens(parse: Parse) -> None:
    settings = parse("--host-id", "a", "--state-dir=b", "--insecure", "--metrics-listen", "")
    assert (settings.host_id, settings.state_dir, settings.metrics_listen) == ("a", Path("b"), "")
    assert settings.security == Security.insecure()


def test_plain_text_needs_the_option_insecure(parse: Parse) -> None:
    with pytest.raises(InvalidInputError, match="--insecure"):
        _ = parse().security


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--threads", "many"], "--threads: "),
        (["--threads", "0"], "--threads: "),
        (["--log-format", "xml"], "--log-format: "),
        (["--thread", "1"], "--thread 1"),
        (["more"], "more"),
        (["--listen"], "--listen"),
    ],
    ids=str,
)
def test_error_about_a_bad_flag_is_one_line_with_its_name(
    parse: Parse, arguments: list[str], said: str
) -> None:
    with pytest.raises(InvalidInputError) as raised:
        parse(*arguments)
    assert said in str(raised.value)
    assert str(raised.value).endswith("(see --help)")
    assert "\n" not in str(raised.value)


def test_bad_value_of_the_environment_is_named(
    parse: Parse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLLAPIPE_THREADS", "many")
    with pytest.raises(InvalidInputError, match="--threads: "):
        parse()


@pytest.mark.parametrize(
    ("content", "said"),
    [("thraeds = 2", "thraeds: "), ("threads = = 2", "tester.toml: .*line 1, column 11")],
    ids=["unknown key", "no TOML"],
)
def test_mistake_in_the_file_is_named(parse: Parse, config: Path, content: str, said: str) -> None:
    config.write_text(content + "\n")
    with pytest.raises(InvalidInputError, match=said):
        parse("--config", str(config))


@pytest.mark.parametrize("name", ["absent.toml", "x" * 300], ids=["missing", "unreadable folder"])
def test_config_file_that_cannot_be_read_is_named(parse: Parse, name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"--config {name}"):
        parse("--config", name)  # Looking for the long name fails, as in an unreadable folder.
