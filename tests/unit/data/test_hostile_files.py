"""Files of data that were made to harm: a control unit refuses each, and reads nothing outside of the folders of data."""

import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from collapipe.data import data_files
from collapipe.data.appended_file import AppendedFile
from collapipe.data.cluster_rows import ClusterRows
from collapipe.data.data_files import MOST_CHARACTERS, DataFile, memory
from collapipe.data.hub import load_hub_rows
from collapipe.data.rows import Row
from collapipe.data.sources import open_file
from collapipe.data.table_process import MEMORY_BYTES
from collapipe.errors import InvalidInputError, NotPermittedError
from collapipe.job import DataConfig, JobConfig
from collapipe.pretrained_directories import read_text

GOOD = '{"text": "it is warm", "label": "warm"}\n'
SECRET = '{"text": "the password", "label": "secret"}\n'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Returns a folder of data, beside a file that no job may read."""
    (tmp_path / "secret.jsonl").write_text(SECRET, encoding="utf-8")
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def read(path: Path | str, kind: str = "classification", *folders: Path) -> list[Row]:
    return open_file(str(path), kind, DataConfig(), folders=folders).read()


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").symlink_to("/dev/zero")
    (tmp_path / "b.parquet").symlink_to("/dev/zero")
    (tmp_path / "pipe.json").symlink_to("a.jsonl")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "c.csv"))
    for name in ("a.jsonl", "b.jsonl", "b.parquet", "pipe.json", "c.csv"):
        with pytest.raises(InvalidInputError, match=rf"/{name}: .* regular file"):
            read(tmp_path / name)


@pytest.mark.parametrize("name", ["a\0b.jsonl", "a\0b.json", "a\0b.parquet", "\ud800.jsonl"])
def test_name_that_no_file_can_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInputError, match="cannot be read"):
        read(f"{tmp_path}/{name}")


@pytest.mark.parametrize("in_the_middle", [False, True])
def test_link_that_changes_after_the_first_reading_is_not_followed_out_of_the_folder(
    root: Path, in_the_middle: bool
) -> None:
    (root / "inner").mkdir()
    (root / "inner/secret.jsonl").write_text(GOOD, encoding="utf-8")
    link = root / "link"
    target = ("inner", "..") if in_the_middle else ("inner/secret.jsonl", "../secret.jsonl")
    link.symlink_to(target[0])
    path = link / "secret.jsonl" if in_the_middle else link.rename(root / "link.jsonl")
    source = open_file(str(path), "classification", DataConfig(), folders=[root])
    assert len(source.read()) == 1
    moved = path.parent if in_the_middle else path
    moved.unlink()
    moved.symlink_to(target[1])
    with pytest.raises(NotPermittedError, match=rf"{root.parent}/secret\.jsonl.* {root}"):
        source.read()


def test_control_unit_gives_the_folders_to_every_file_of_a_job(root: Path) -> None:
    good = root / "a.jsonl"
    good.write_text(GOOD * 20, encoding="utf-8")
    link = root / "b.jsonl"
    link.symlink_to("../secret.jsonl")
    for data in ({"train": str(link)}, {"train": str(good), "held_out": str(link)}):
        document = {"task": {"kind": "classification"}, "data": data}
        rows = ClusterRows(JobConfig.from_dict(document, "job"), 0, None, [root])
        with pytest.raises(NotPermittedError, match="secret"):
            rows.read()


def test_file_is_read_to_the_size_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(GOOD, encoding="utf-8")
    source = open_file(str(path), "classification", DataConfig())
    check = data_files.check_memory

    def grow(*arguments: Any, **options: Any) -> None:
        check(*arguments, **options)
        with path.open("a", encoding="utf-8") as file:
            file.write(GOOD)

    monkeypatch.setattr("collapipe.data.appended_file.check_memory", grow)
    assert len(source.read()) == 1
    source.accept()
    assert len(source.read()) > 0


def test_file_that_needs_more_memory_than_is_free_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files, "memory", lambda: (50_000_000, 100_000_000))
    path = tmp_path / "a.jsonl"
    path.touch()
    os.truncate(path, 1 << 40)  # It takes no space on the disk.
    with pytest.raises(InvalidInputError, match=r"a\.jsonl.* 1,099,511,627,776 .* 50 MB of 100 MB"):
        read(path)
    path.write_text("\n" * 60_000, encoding="utf-8")  # 60 KB, but 60 MB of lines.
    with pytest.raises(InvalidInputError, match=r"a\.jsonl.* 60,000 lines"):
        read(path)


def test_rows_that_fill_the_memory_are_refused_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    path.write_text(f"[{','.join([GOOD] * 600)}]", encoding="utf-8")
    assert len(read(path)) == 600
    monkeypatch.setattr(data_files, "memory", lambda: (4_000_000, 100_000_000))
    with pytest.raises(InvalidInputError, match=r"a\.json:256: .* 4 MB of 100 MB"):
        read(path)


def test_memory_is_that_of_the_container(tmp_path: Path) -> None:
    free, total = memory(tmp_path)
    assert 0 < free <= total
    for name, content in {
        "memory.max": "1000000",
        "memory.current": "700000",
        "memory.stat": "anon 500000\ninactive_file 150000\nactive_file 50000",
    }.items():
        (tmp_path / name).write_text(f"{content}\n", encoding="utf-8")
    assert memory(tmp_path) == (500_000, 1_000_000)
    (tmp_path / "memory.max").write_text("max\n", encoding="utf-8")
    assert memory(tmp_path)[1] == total


@pytest.mark.parametrize(
    ("name", "start"),
    [("a.jsonl", b""), ("a.csv", b"text,label\n"), ("a.txt", b""), ("a.conll", b"")],
)
def test_line_that_is_too_long_is_refused(tmp_path: Path, name: str, start: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(start + b"x" * (MOST_CHARACTERS + 1))
    kinds = {"a.txt": "causal_lm", "a.conll": "ner"}
    line = 1 + start.count(b"\n")
    with pytest.raises(InvalidInputError, match=rf"{name}:{line}: .* {MOST_CHARACTERS} "):
        read(path, kinds.get(name, "classification"))


def test_quote_that_is_never_closed_does_not_make_the_file_one_value(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text,label\na,b\n"' + "x" * 99 + "\n" + ("x" * 1023 + "\n") * (1 << 13))
    with pytest.raises(InvalidInputError, match=rf"a\.csv:3: .*{MOST_CHARACTERS}"):
        read(path)


def test_json_array_that_is_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[", encoding="utf-8")
    os.truncate(path, (1 << 26) + 1)
    with pytest.raises(InvalidInputError, match=rf"a\.json: .* {1 << 26} .*jq"):
        read(path)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.json"])
def test_many_columns_are_refused_in_a_short_message(tmp_path: Path, name: str) -> None:
    columns = [f"column {number}" for number in range(10_001)]
    record = json.dumps(dict.fromkeys(columns, 1))
    content = {"a.csv": ",".join(columns) + "\n", "a.jsonl": record, "a.json": f"[{record}]"}
    (tmp_path / name).write_text(content[name], encoding="utf-8")
    with pytest.raises(InvalidInputError, match=r":1: .*10001.* 10000 ") as caught:
        read(tmp_path / name)
    assert len(str(caught.value)) < 1000


def test_sentence_without_an_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.conll"
    path.write_text(f"{'x' * 2000} O\n" * 2100, encoding="utf-8")
    with pytest.raises(InvalidInputError, match=rf"a\.conll:1: .* {MOST_CHARACTERS} "):
        read(path, "ner")


@pytest.mark.parametrize("where", ["train", "held_out"])
def test_labels_that_are_texts_are_refused(tmp_path: Path, where: str) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    records = [{"text": f"text {number}", "label": "ab"[number % 2]} for number in range(20)]
    long = [{**record, "label": f"{record['text']} {'x' * 120_000}"} for record in records]
    for path, written in ((good, records), (bad, [*long, *records])):
        path.write_text("".join(json.dumps(row) + "\n" for row in written), encoding="utf-8")
    data = {"train": str(good), "held_out": str(good), where: str(bad)}
    if where == "train":
        del data["held_out"]
    rows = ClusterRows(
        JobConfig.from_dict({"task": {"kind": "classification"}, "data": data}, "job"), 0
    )
    new = rows.read()
    with pytest.raises(InvalidInputError, match=rf"bad\.jsonl: .* {1 << 21} .*data.label_column"):
        rows.check(new)


# --- tables


def test_small_parquet_file_of_many_gigabytes_is_refused(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    # All rows have one text of 15 MB, which the file has once.
    indices = pa.array([0] * 10_000, pa.int32())
    texts = pa.DictionaryArray.from_arrays(indices, pa.array(["x" * (15 << 20)]))
    table = pa.table({"text": texts, "label": ["a", "b"] * 5_000})
    parquet.write_table(table, path, compression="zstd", write_statistics=False)
    assert path.stat().st_size < 10_000
    with pytest.raises(InvalidInputError, match=rf"a\.parquet.* {MEMORY_BYTES} "):
        read(path)


def test_module_in_the_directory_of_the_service_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": ["a"], "label": ["b"]}), path)
    for name in ("json", "pyarrow", "resource"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(3)\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert [row.texts for row in read(path)] == [("a",)]


def test_damaged_tables_end_no_service(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": ["a", "b"] * 500, "label": ["c", "d"] * 500}), path)
    whole = path.read_bytes()
    for position in range(4, len(whole), 400):
        path.write_bytes(whole[:position] + b"\xff\xff\xff\xff" + whole[position + 4 :])
        try:
            read(path)
        except InvalidInputError as error:
            assert str(path) in str(error)


def saved(folder: Path) -> Path:
    """Saves a table as `save_to_disk` does, and returns its folder."""
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([json.loads(SECRET)]).save_to_disk(folder)
    return folder


@pytest.mark.parametrize("name", ["../../other/data-00000-of-00001.arrow", "/etc/passwd", "..", 5])
def test_saved_folder_names_no_file_outside_of_it(root: Path, name: object) -> None:
    saved(root.parent / "other")
    state = saved(root / "saved") / "state.json"
    state.write_text(json.dumps({"_data_files": [{"filename": name}]}), encoding="utf-8")
    with pytest.raises(InvalidInputError, match=rf"state\.json: .*{name}"):
        read(root / "saved")


def test_saved_folder_with_a_link_out_of_the_folders_is_refused(root: Path) -> None:
    other = saved(root.parent / "other") / "data-00000-of-00001.arrow"
    own = saved(root / "saved") / other.name
    assert read(root / "saved", "classification", root)[0].labels == ("secret",)
    own.unlink()
    own.symlink_to(other)
    with pytest.raises(NotPermittedError, match=rf"{other}.* {root}"):
        read(root / "saved", "classification", root)


@pytest.mark.parametrize("content", ["[", "[" * 100_000, "{}", '{"_data_files": [{}]}', "5"])
def test_saved_folder_with_a_wrong_list_of_files_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "state.json").write_text(content, encoding="utf-8")
    with pytest.raises(InvalidInputError, match=r"state\.json: "):
        read(tmp_path)


def test_bytes_that_are_in_memory_are_not_counted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(GOOD * 1000, encoding="utf-8")
    size, all_memory = path.stat().st_size, 100_000_000
    # Just enough: before the file is read, and with the file in memory, which its rows and their texts still need.
    free = [all_memory // 20 + 4 * size + 1000 * 1000 - used for used in (0, size)]
    monkeypatch.setattr(data_files, "memory", lambda: (free.pop(0), all_memory))
    assert len(AppendedFile(DataFile("a", path)).read().lines) == 1000


@pytest.mark.parametrize("form", ["parquet", "save_to_disk"])
def test_columns_with_bytes_take_no_memory(tmp_path: Path, form: str) -> None:
    datasets = pytest.importorskip("datasets")
    path = tmp_path / "rows.parquet"
    size = MEMORY_BYTES // 8
    record = {"text": "a", "label": "b", "picture": {"bytes": bytes(size), "path": "c"}}
    table = datasets.Dataset.from_list([record] * 9)
    table.to_parquet(path) if form == "parquet" else table.save_to_disk(path)
    assert [row.texts for row in read(path)] == [("a",)] * 9
    with pytest.raises(InvalidInputError, match=r"'picture'.*data\.label_column"):
        open_file(str(path), "classification", DataConfig(label_column="none")).read()


# --- folders of the library `datasets`


@pytest.mark.parametrize("way", ["link", "path", "relative path"])
def test_folder_of_a_data_set_names_no_file_outside_of_the_folders(root: Path, way: str) -> None:
    pytest.importorskip("datasets")
    folder = root / "set"
    folder.mkdir()
    secret = root.parent / "secret.jsonl"
    if way == "link":
        (folder / "train.jsonl").symlink_to(secret)
    else:
        name = secret if way == "path" else "../../secret.jsonl"
        configs = f"---\nconfigs:\n- config_name: default\n  data_files: {name}\n---\n"
        (folder / "README.md").write_text(configs, encoding="utf-8")
    data = DataConfig(source="hub", hub_name=str(folder), train="train")
    with pytest.raises(NotPermittedError, match=rf"{secret}.* {root}"):
        load_hub_rows("train", "classification", data, [root])


@pytest.mark.parametrize("name", ["text", "json", "pandas"])
def test_hub_name_does_not_stand_for_the_directory_of_the_process(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "train.json").write_text(SECRET, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    data = DataConfig(source="hub", hub_name=name, train="train")
    with pytest.raises(InvalidInputError, match=rf"hub_name.*'{name}'"):
        load_hub_rows("train", "classification", data)


@pytest.mark.parametrize("read_it", [lambda path: DataFile("a", path).open(), read_text])
def test_file_that_becomes_a_pipe_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_it: Callable[[Path], object]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(GOOD, encoding="utf-8")
    before = path.stat()
    path.unlink()
    os.mkfifo(path)
    stat = Path.stat
    monkeypatch.setattr(
        Path, "stat", lambda self, **kw: before if self == path else stat(self, **kw)
    )
    refused = threading.Event()

    def open_it() -> None:
        with pytest.raises(InvalidInputError, match="regular file"):
            read_it(path)
        refused.set()

    threading.Thread(target=open_it, daemon=True).start()
    assert refused.wait(30)
