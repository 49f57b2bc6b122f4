"""The local cache of the library `datasets` is enough without a network."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("datasets")

CODE = """
import sys
from pathlib import Path
import datasets
from collapipe.data.hub import load_hub_rows
from collapipe.errors import InvalidInputError
from collapipe.job import DataConfig

data = DataConfig(source="hub", hub_name="some/set", train="train")
try:
    load_hub_rows("train", "classification", data)
except InvalidInputError as error:
    print(error)
folder = Path(sys.argv[1])
folder.mkdir()
datasets.Dataset.from_list([{"text": "it is warm", "label": "warm"}]).to_parquet(folder / "train.parquet")
builder = datasets.load_dataset_builder(str(folder))
builder.download_and_prepare()
cached = Path(datasets.config.HF_DATASETS_CACHE) / "some___set" / "default" / "0.0.0"
cached.mkdir(parents=True)
Path(builder.cache_dir).rename(cached / "abc")
print(load_hub_rows("train", "classification", data))
"""


def test_cached_name_works_without_network_and_another_is_refused(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    for name in ("HF_DATASETS_CACHE", "HF_HUB_CACHE"):
        environment.pop(name, None)
    command = [sys.executable, "-c", CODE, str(tmp_path / "set")]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    refusal, rows = done.stdout.splitlines()
    assert f"is not in the local cache ({tmp_path}/home/datasets)" in refusal
    assert "the hub cannot be reached" in refusal and "bring the rows as files" in refusal
    assert rows == "[Row(file='some/set[train]', line=1, texts=('it is warm',), labels=('warm',))]"
