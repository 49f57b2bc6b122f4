from pathlib import Path
from typing import Any

import pytest

from collapipe.errors import InvalidInputError
from collapipe.job import JobConfig
from collapipe_client.job_files import (
    check_family,
    check_has_data,
    load_job,
    load_preset,
    parse_setting,
    preset_names,
    read_job,
    with_local_paths,
)

_WITH_DATA = ["causal_lm", "demo", "instruction"]
_WITHOUT_DATA = ["classification", "ner", "translation"]


def test_presets_are_valid_jobs_and_those_without_data_show_its_format() -> None:
    assert preset_names() == sorted(_WITH_DATA + _WITHOUT_DATA)
    assert [load_preset(name).name for name in preset_names()] == preset_names()
    for name in _WITH_DATA:
        check_has_data(load_preset(name))
    for name in _WITHOUT_DATA:
        with pytest.raises(InvalidInputError, match=r"data\.train=train\.") as error:
            check_has_data(load_preset(name))
        assert "Format: " in str(error.value)


@pytest.mark.parametrize(
    ("setting", "keys", "value"),
    [
        ("training.rounds=5", ["training", "rounds"], 5),
        ("training.learning_rate=3e-4", ["training", "learning_rate"], 3e-4),
        ("training.recompute=true", ["training", "recompute"], True),
        ("training.betas=[0.9, 0.98]", ["training", "betas"], [0.9, 0.98]),
        ("data.train=a.jsonl", ["data", "train"], "a.jsonl"),
        ('data.train=["a", "b"]', ["data", "train"], ["a", "b"]),
        ("name=5", ["name"], "5"),
        ('name="quoted"', ["name"], "quoted"),
        ("data.train=a=b", ["data", "train"], "a=b"),
        ("model.config.hidden_size=256", ["model", "config", "hidden_size"], 256),
        ("model.config.activation=gelu", ["model", "config", "activation"], "gelu"),
        ("model.pretrained=", ["model", "pretrained"], None),
        ("model.lora.r=4", ["model", "lora", "r"], 4),
        ("model.lora=", ["model", "lora"], None),
    ],
)
def test_setting_is_read_by_the_type_of_its_key(setting: str, keys: list[str], value: Any) -> None:
    assert parse_setting(setting) == (keys, value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("training.round=5", "'training.rounds'"),
        ("trainin.rounds=5", "'training.rounds'"),
        ("training.rounds.x=5", "training.rounds.x"),
        ("training=5", "training.rounds"),
    ],
)
def test_wrong_setting_is_refused_with_a_remedy(setting: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        parse_setting(setting)


def test_settings_are_validated_together() -> None:
    settings = ["training.mini_batch=30", "schedule.num_micro_batches=5", "model.pretrained="]
    job = load_preset("demo", settings)
    assert job.training.mini_batch == 30
    assert job.model.pretrained is None  # An empty setting restores the default.


@pytest.mark.parametrize(
    ("family", "words"),
    [("t5", "'t5'.*classification"), ("bertt", "'bert'")],
)
def test_unknown_family_is_refused_with_those_that_can_do_the_task(family: str, words: str) -> None:
    job = load_preset("classification", ["model.pretrained=", f"model.family={family}"])
    with pytest.raises(InvalidInputError, match=words):
        check_family(job)


def test_paths_are_relative_to_the_job_file_or_for_settings_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, here = tmp_path / "jobs", tmp_path / "here"
    folder.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    (folder / "train.jsonl").touch()
    (here / "held_out.jsonl").touch()
    file = folder / "job.toml"
    file.write_text(
        '[task]\nkind = "classification"\n[data]\ntrain = "train.jsonl"\nheld_out = "other"\n',
        encoding="utf-8",
    )
    job = with_local_paths(load_job(file, ["data.held_out=held_out.jsonl"]))
    assert job.data.train == str(folder / "train.jsonl")
    assert job.data.held_out == str(here / "held_out.jsonl")
    assert load_job(file, local=False).data.train == "train.jsonl"


def test_both_files_of_a_parallel_text_are_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.en").touch()
    job = load_preset("translation", ["data.train=a.en,a.de"])
    with pytest.raises(InvalidInputError, match=f"{tmp_path}/a.de"):
        with_local_paths(job)
    (tmp_path / "a.de").touch()
    assert with_local_paths(job).data.train == f"{tmp_path}/a.en,{tmp_path}/a.de"


def test_folders_are_made_absolute_and_names_of_the_hub_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "saved").mkdir()
    for given, expected in (
        ("bert-base-uncased", "bert-base-uncased"),
        ("org/model", "org/model"),
        ("saved", f"{tmp_path}/saved"),
        ("./other", f"{tmp_path}/other"),
    ):
        job = with_local_paths(load_preset("demo", [f"model.pretrained={given}"]))
        assert job.model.pretrained == expected
    job = with_local_paths(load_preset("classification", ["data.train=saved"]))
    assert job.data.train == f"{tmp_path}/saved"
    settings = ["data.source=hub", "data.train=train", "data.hub_name="]
    for name, expected in (("saved", f"{tmp_path}/saved"), ("some/set", "some/set")):
        job = load_preset("classification", [*settings[:2], settings[2] + name])
        assert with_local_paths(job).data.hub_name == expected


@pytest.mark.parametrize(
    ("content", "message"), [("x = ", "TOML"), ("x = 1", "'x'"), (None, "--preset .*demo")]
)
def test_error_names_a_bad_job_file(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "job.toml"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(InvalidInputError, match=message) as error:
        load_job(file)
    assert str(file) in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task.kind": "ner"}, "'ner'"),
        ({"schedule.sequence_slices": [0, 2]}, "sequence_slices.0 = 0"),
        ({"schedule.sequence_slices": [1, 9]}, "9"),
        ({"training.update_per": "micro_batch"}, "training.update_per"),
    ],
    ids=str,
)
def test_slices_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    document: dict[str, Any] = {
        "task": {"kind": "causal_lm", "max_length": 8},
        "training": {},
        "schedule": {"sequence_slices": [1, 4]},
    }
    assert JobConfig.from_dict(document, "job.toml").schedule.sequence_slices == [1, 4]
    for key, value in changes.items():
        section, name = key.split(".")
        document[section][name] = value
    with pytest.raises(InvalidInputError, match=message):
        JobConfig.from_dict(document, "job.toml")


@pytest.mark.parametrize(
    ("up", "given", "clusters", "devices", "used"),
    [
        ({0: 2}, [], 1, [2], None),
        ({0: 2, 1: 4}, ["clusters=1"], 1, [2], None),
        ({0: 1, 2: 3}, [], 2, [1, 3], [0, 2]),
        ({0: 2}, ["devices_per_cluster=1"], 2, 1, None),
        ({0: 2}, ["clusters=3"], 3, 3, None),
        ({}, [], 2, 3, None),
    ],
)
def test_a_preset_takes_the_clusters_that_are_up_unless_its_user_says_which(
    up: dict[int, int], given: list[str], clusters: int, devices: Any, used: list[int] | None
) -> None:
    job = read_job(None, "demo", given, is_local=True, devices=up)
    assert (job.clusters, job.devices_per_cluster, job.use_clusters) == (clusters, devices, used)
