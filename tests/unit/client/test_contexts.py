import pytest

from .commands import run, run_json
from .fake_services import FakeServices

pytestmark = pytest.mark.usefixtures("in_empty_folder")


def test_commands_use_the_context_that_is_named_or_in_use(fake: FakeServices) -> None:
    run("context", "add", "lab", *fake.options)
    assert "nothing is up" in run("status").stdout
    assert run_json("status", "--context", "lab")["scheduler"] == fake.address
    run("context", "use", "lab")
    assert run_json("status")["scheduler"] == fake.address
    assert "context lab" in run("status", "--json").stderr
    assert run_json("context", "list")["used"] == "lab"
    run("context", "use")
    assert "nothing is up" in run("status").stdout


def test_printed_commands_have_names_as_a_shell_needs_them() -> None:
    name = "my lab; true"
    assert (
        f"use '{name}'`" in run("context", "add", name, "--scheduler", "h:1", "--insecure").stdout
    )
    for command in (["context", "use", "a $(b)"], ["context", "add", "a $(b)"]):
        assert "add 'a $(b)'" in " ".join(run(*command, code=2).stderr.split())


def test_removed_context_is_in_use_no_more() -> None:
    run("context", "add", "lab", "--scheduler", "h:1", "--insecure")
    run("context", "use", "lab")
    run("context", "remove", "lab")
    assert run_json("context", "list") == {"used": "", "contexts": {}}


def test_unknown_context_is_refused_with_those_that_there_are() -> None:
    run("context", "add", "lab", "--scheduler", "h:1", "--insecure")
    for command in (["context", "use", "lba"], ["status", "--context", "lba"]):
        said = run(*command, code=2).stderr
        assert "'lba'" in said and "lab" in said
