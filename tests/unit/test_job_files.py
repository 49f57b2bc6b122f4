"""Which files of a host a job may name."""

from pathlib import Path
from typing import Any

import pytest

from collapipe.errors import InvalidInputError, NotPermittedError
from collapipe.job import JobConfig
from collapipe.job_files import check_job_files, place_of


def job(kind: str = "classification", **sections: Any) -> JobConfig:
    return JobConfig.from_dict({"task": {"kind": kind}, "clusters": 2, **sections}, "JOB.toml")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("data", "models", "secret"):
        (tmp_path / folder).mkdir()
    (tmp_path / "data" / "rows.jsonl").touch()
    (tmp_path / "data" / "link.jsonl").symlink_to(tmp_path / "secret" / "key.pem")
    return tmp_path


def check(job: JobConfig, root: Path, cluster_index: int | None = 0) -> None:
    check_job_files(job, [root / "data", root / "models"], cluster_index)


def test_files_and_pretrained_directories_in_the_folders_are_allowed(root: Path) -> None:
    data = {"train": f"{root}/data/rows.jsonl", "held_out": f"{root}/data/new/../rows.jsonl"}
    check(job(data=data, model={"pretrained": f"{root}/models/bert"}), root)
    check(job(data=data, model={"pretrained": "minilm"}), root)
    check(job(model={"pretrained": "org/model"}), root)
    check(job(data={"source": "stdlib_docstrings"}), root)
    check(job(data={"source": "hub", "hub_name": "ag_news", "train": "train"}), root)


def test_relative_name_begins_in_the_data_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root / "secret")
    folders = [root / "data", root / "models"]
    check(job(data={"train": "rows.jsonl", "held_out": "./new/../rows.jsonl"}), root)
    assert place_of("rows.jsonl", folders) == root / "data/rows.jsonl"
    assert place_of("/srv/rows.jsonl", folders) == Path("/srv/rows.jsonl")
    assert place_of("rows.jsonl", []) == Path("rows.jsonl")
    with pytest.raises(NotPermittedError, match=rf"^data.train .*{root}/secret"):
        check(job(data={"train": "../secret/key.pem"}), root)


@pytest.mark.parametrize(
    ("setting", "sections"),
    [
        ("data.train", {"data": {"train": "{root}/secret/key.pem"}}),
        ("data.train", {"data": {"train": "{root}/data/../secret/key.pem"}}),
        ("data.train", {"data": {"train": "{root}/data/link.jsonl"}}),
        ("data.train", {"data": {"train": "{root}/data2/rows.jsonl"}}),
        ("data.train", {"data": {"train": ["{root}/secret/key.pem", "{root}/data/rows.jsonl"]}}),
        ("data.train", {"kind": "translation", "data": {"train": "{root}/data/a,{root}/secret/b"}}),
        ("data.held_out", {"data": {"train": "{root}/data/a.jsonl", "held_out": "/etc/passwd"}}),
        ("data.hub_name", {"data": {"source": "hub", "hub_name": "{root}/secret", "train": "a"}}),
        ("model.pretrained", {"model": {"pretrained": "{root}/secret"}}),
        ("model.pretrained", {"model": {"pretrained": "org/../../secret"}}),
    ],
)
def test_other_files_are_refused_and_the_setting_is_named(
    root: Path, setting: str, sections: dict[str, Any]
) -> None:
    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: filled(each) for name, each in value.items()}
        if isinstance(value, list):
            return [filled(each) for each in value]
        return value.replace("{root}", str(root))

    with pytest.raises(NotPermittedError, match=rf"^{setting} .*{root}/models"):
        check(job(**filled(sections)), root)


def test_second_of_two_parallel_files_is_checked_without_the_blanks_before_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root / "data")  # The root may be "." of the service.
    for train in ("a, /etc/passwd", " /etc/passwd,a"):
        with pytest.raises(NotPermittedError, match=r"^data.train .*/etc/passwd"):
            check(job("translation", data={"train": train}), root)


def test_comma_in_the_name_of_a_single_file_divides_no_path(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "data/a,b").mkdir()
    (root / "data/deep/deeper").mkdir(parents=True)
    monkeypatch.chdir(root / "data/deep/deeper")
    with pytest.raises(NotPermittedError, match=r"^data.train .*secret"):
        check(job(data={"train": f"{root}/data/a,b/../../secret/rows.jsonl"}), root)


@pytest.mark.parametrize("name", ["a\0b.jsonl", "~nosuchuser/rows.jsonl", "{root}/data/loop"])
def test_name_that_is_no_path_is_refused(root: Path, name: str) -> None:
    (root / "data/loop").symlink_to("loop")
    path = name.replace("{root}", str(root))
    with pytest.raises((InvalidInputError, NotPermittedError), match=r"^data.train "):
        check(job(data={"train": path}), root)


def test_pretrained_directory_with_a_link_to_a_file_elsewhere_is_refused(root: Path) -> None:
    directory = root / "models" / "bert"
    directory.mkdir()
    (root / "models" / "blob").touch()
    (directory / "config.json").symlink_to(root / "models" / "blob")
    named = job(model={"pretrained": str(directory)})
    check(named, root)
    (directory / "chat_template.jinja").symlink_to(root / "secret" / "key.pem")
    with pytest.raises(NotPermittedError, match=rf"^model.pretrained .*{root}/secret/key.pem"):
        check(named, root)


def test_host_that_reads_no_rows_checks_the_pretrained_directory_only(root: Path) -> None:
    check(job(data={"train": "/etc/passwd"}), root, cluster_index=None)
    with pytest.raises(NotPermittedError, match=r"^model.pretrained .*/etc"):
        check(job(model={"pretrained": "/etc"}), root, cluster_index=None)


def test_without_a_data_root_every_file_is_allowed() -> None:
    check_job_files(job(data={"train": "/etc/passwd"}), [], 0)


def test_a_cluster_that_the_job_does_not_have_is_refused(root: Path) -> None:
    files = job(data={"train": [f"{root}/data/rows.jsonl"] * 2})
    with pytest.raises(InvalidInputError, match="cluster 2"):
        check(files, root, cluster_index=2)
