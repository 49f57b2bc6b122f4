"""What documents and code say about files and equations is true."""

import re
from pathlib import Path

import pytest

from collapipe.v1.scheduler_pb2 import IncidentCode, WarningCode
from collapipe_client.job_files import load_job

REPOSITORY = Path(__file__).parent.parent.parent
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")
PATH = re.compile(r"`((?:services|clients|tests|deploy|protos|docs|benchmarks)/[\w./-]+)`")
EQUATION = re.compile(r"docs/scheduling\.md \((\d+)\)")


def files(*patterns: str) -> list[Path]:
    """Lists files of the repository, without what is built."""
    found = [path for pattern in patterns for path in REPOSITORY.glob(pattern)]
    for folder in (".ci", "benchmarks", "clients", "deploy", "docs", "protos", "services", "tests"):
        found += [path for pattern in patterns for path in (REPOSITORY / folder).rglob(pattern)]
    return found


def test_links_of_documents_lead_to_files() -> None:
    dead = [
        f"{page.relative_to(REPOSITORY)}: {target}"
        for page in files("*.md")
        for target in LINK.findall(page.read_text("utf-8"))
        if not (page.parent / target).exists()
    ]
    assert not dead


def test_paths_that_documents_name_exist() -> None:
    missing = [
        f"{page.relative_to(REPOSITORY)}: {path}"
        for page in files("*.md")
        for path in PATH.findall(page.read_text("utf-8"))
        if not (REPOSITORY / path).exists()
    ]
    assert not missing


@pytest.mark.parametrize(
    ("name", "prefix", "values"),
    [
        ("operations.md", "INCIDENT_CODE_", IncidentCode.keys()),
        ("running.md", "WARNING_CODE_", WarningCode.keys()),
    ],
)
def test_page_explains_every_code(name: str, prefix: str, values: list[str]) -> None:
    page = (REPOSITORY / "docs" / name).read_text("utf-8")
    codes = {value.removeprefix(prefix) for value in values}
    assert set(re.findall(r"^\| `([A-Z_]+)` \|", page, re.MULTILINE)) == codes - {"UNSPECIFIED"}


def test_equations_that_code_cites_exist() -> None:
    page = (REPOSITORY / "docs" / "scheduling.md").read_text("utf-8")
    known = set(re.findall(r"^\*\*\((\d+)\)", page, re.MULTILINE))
    assert known == {str(number) for number in range(1, 14)}
    cited = {
        number for path in files("*.py") for number in EQUATION.findall(path.read_text("utf-8"))
    }
    assert cited and cited <= known


def test_code_cites_no_document_that_is_not_in_the_repository() -> None:
    old = re.compile(r"\bdesign(/\w+\.md)?,? \(?\d|\bdesign/\w+\.md")
    citing = [
        f"{path.relative_to(REPOSITORY)}:{number}"
        for path in files("*.py", "*.proto", "*.toml")
        if path != Path(__file__)
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if old.search(line)
    ]
    assert not citing


def test_job_file_of_the_running_page_is_a_job(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "running.md").read_text("utf-8")
    [block] = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    path = tmp_path / "job.toml"
    path.write_text(block, "utf-8")
    assert load_job(path, []).name == "questions"
