"""What a person may type or give by mistake: every command answers with one clear message, and never with a traceback."""

import errno
import gzip
import json
import os
import pwd
import resource
import shlex
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import typer
from typer.testing import CliRunner, Result

from collapipe_client.cli import app
from collapipe_client.reporting import exit_codes
from collapipe_client.workspace import Workspace

TRAIN = "train --preset demo"
ROWS = "train --preset classification --set data.train="
PAIRS = "train --preset translation --set data.train="
TEXTS = "train --preset causal_lm --set data.source=files --set data.train="
ANSWERS = "train --preset instruction --set data.source=files --set data.train="
NOBODY = "--scheduler 127.0.0.1:9 --insecure"
NEED_TESTBED = (
    *("jobs list", "jobs show x", "jobs cancel x", "jobs delete x --yes", "plan show"),
    *("export x {d}/out", "predict x text", "evaluate x --data y.csv", "rollback x 1"),
)

pytestmark = pytest.mark.usefixtures("in_empty_folder")

CASES: dict[str, tuple[str, list[str]]] = {
    # Options of the testbed.
    "size in three words": (f"{TRAIN} --device-memory 3 GB", ["'3 GB'"]),
    "misspelt unit": (f"{TRAIN} --device-memory 3GBB", ["--device-memory", "'3GBB'", "200MB"]),
    "negative size": (f"{TRAIN} --device-memory=-3GB", ["--device-memory", "'-3GB'", "200MB"]),
    "huge size": (f"{TRAIN} --device-memory {10**30}GB", ["--device-memory", "at most"]),
    "less than a byte": (f"{TRAIN} --device-memory 0.2B", ["--device-memory", "'0.2B'"]),
    "sizes for other devices": (f"{TRAIN} --device-memory 1GB,2GB", ["2 values", "6 for every"]),
    "negative speed": (f"{TRAIN} --device-speed=-5", ["--device-speed", "'-5'"]),
    "endless speed": (f"{TRAIN} --device-speed inf", ["--device-speed", "'inf'", "40"]),
    "speed that is no number": (f"{TRAIN} --device-speed nan", ["--device-speed", "'nan'"]),
    "devices in words": (f"{TRAIN} --devices two", ["--devices two", "3,3"]),
    "no devices": (f"{TRAIN} --devices 0", ["--devices 0", "3,3"]),
    "more devices than a machine can run": ("up --devices 1000000000", ["1000000000", "at most"]),
    "more clusters than a machine can run": ("up --clusters 1000000", ["at most"]),
    "no clusters": ("up --clusters 0", ["--clusters", "greater than or equal to 1"]),
    "too few devices": (f"{TRAIN} --devices 1", ["needs 2 clusters of 3, 3", "1, 1"]),
    "misspelt profile": (f"{TRAIN} --emulate raspbery-pi-4", ["did you mean 'raspberry-pi-4'"]),
    "profile and file": (f"{TRAIN} --emulate laptop --emulation e.json", ["give one of them"]),
    "missing emulation": (f"{TRAIN} --emulation e.json", ["e.json", "No such file"]),
    "emulation that is no JSON": (f"{TRAIN} --emulation {{d}}/broken.toml", ["broken.toml"]),
    "devices of too few clusters": ("up --devices 1,2 --clusters 3", ["1,2", "3 clusters"]),
    "port alone": ("up --listen 7070", ["--listen 7070", "HOST:PORT"]),
    "port that does not exist": ("up --listen 127.0.0.1:99999", ["65535"]),
    "address of another machine": ("up --listen 192.0.2.1:7000", ["192.0.2.1:7000", "address"]),
    "host without an address": ("up --listen no.invalid:7000", ["no.invalid:7000"]),
    "port in use": ("up --listen {taken}", ["cannot listen on {taken}", "free the port"]),
    "workspace is a file": ("up --workspace {d}/broken.toml", ["broken.toml", "--workspace"]),
    # Commands and options that do not exist.
    "misspelt command": ("trian", ["'trian'", "'train'"]),
    "misspelt subcommand": ("jobs lst", ["'lst'", "'list'"]),
    "misspelt option": ("train --pesret demo", ["--pesret", "--preset"]),
    "option without a value": ("train --preset", ["--preset", "argument"]),
    # Job files and settings.
    "no job": ("train", ["--preset", "collapipe train --preset demo"]),
    "misspelt preset": ("train --preset dmeo", ["'dmeo'", "did you mean 'demo'"]),
    "two jobs": (f"{TRAIN} {{d}}/job.toml", ["job.toml", "--preset demo", "leave one out"]),
    "missing job file": ("train jobb.toml", ["jobb.toml does not exist", "--preset"]),
    "job file is a folder": ("train {d}/folder", ["folder", "folder"]),
    "job file is not TOML": ("train {d}/broken.toml", ["broken.toml", "line 2"]),
    "job file is empty": ("train {d}/empty.toml", ["empty.toml", "'task' is missing"]),
    "job file is binary": ("train {d}/binary", ["binary", "UTF-8"]),
    "job file is data": ("train {d}/good.jsonl", ["good.jsonl", "data.train"]),
    "job file is huge": ("train {d}/huge.toml", ["huge.toml", "MB"]),
    "job file is deep": ("train {d}/deep.toml", ["deep.toml"]),
    "unknown key": ("train {d}/unknown.toml", ["unknown.toml", "did you mean 'rounds'"]),
    "unknown setting": (f"{TRAIN} --set rounds=1", ["did you mean 'training.rounds'"]),
    "setting without a value": (f"{TRAIN} --set training.rounds", ["KEY=VALUE"]),
    "setting without a key": (f"{TRAIN} --set =3", ["KEY=VALUE"]),
    "section for a key": (f"{TRAIN} --set training=3", ["is a section", "training.rounds"]),
    "key below a key": (f"{TRAIN} --set name.x=3", ["name.x"]),
    "words for a number": (f"{TRAIN} --set training.rounds=many", ["training.rounds", "'many'"]),
    "number out of range": (f"{TRAIN} --set training.rounds=-1", ["training.rounds", "-1", "1"]),
    "rate that is no number": (f"{TRAIN} --set training.learning_rate=nan", ["learning_rate"]),
    "misspelt strategy": (f"{TRAIN} --set schedule.strategy=dsra", ["did you mean 'dssra'"]),
    "misspelt family": (f"{TRAIN} --set model.family=brt", ["'brt'", "did you mean 'bert'"]),
    "family of another task": (
        f"{TRAIN} --set model.family=marian",
        ["'marian'", "use one of bert"],
    ),
    "name with a path": (f"{TRAIN} --set name=../x", ["name", "'../x'", "letters"]),
    "name that is a folder": (f"{TRAIN} --set name=..", ["name", "'..'", "letters"]),
    "long name": (f"{TRAIN} --set name={'a' * 65}", ["name", "64"]),
    "uneven micro-batches": (f"{TRAIN} --set training.mini_batch=7", ["num_micro_batches", "7"]),
    "more clusters than there are": (f"{TRAIN} --set schedule.min_clusters=9", ["at most", "9"]),
    "secure average of two": (f"{TRAIN} --set averaging.secure=true", ["at least 3 clusters"]),
    "no data": ("train --preset ner", ["data.train is not set", "--set data.train=train.conll"]),
    "hub without a name": (f"{TRAIN} --set data.source=hub --set data.train=x", ["hub_name"]),
    "output is not empty": (f"{TRAIN} --output /usr", ["/usr is not empty", "--overwrite"]),
    "export to a full folder": ("export demo /usr", ["/usr is not empty", "--overwrite"]),
    "output is a file": (
        f"{TRAIN} --output {{d}}/job.toml",
        ["job.toml is a file", "give a folder"],
    ),
    "output cannot be made": (f"{TRAIN} --output {{d}}/job.toml/x", ["job.toml/x"]),
    # Data files.
    "missing data": (f"{ROWS}nowhere.csv", ["nowhere.csv does not exist", "data.train=PATH"]),
    "data is a folder": (f"{ROWS}{{d}}/folder", ["folder", "save_to_disk", "data.source"]),
    "unknown format": (f"{ROWS}{{d}}/job.toml", ["job.toml", "not supported", ".csv"]),
    "data of an unknown user": (f"{ROWS}~nobody-here/a.csv", ["~nobody-here/a.csv"]),
    "one file twice": (
        f"{ROWS}{{d}}/good.jsonl --set data.held_out={{d}}/good.jsonl",
        ["good.jsonl", "both data.train and data.held_out"],
    ),
    "empty CSV": (f"{ROWS}{{d}}/empty.csv", ["empty.csv", "has no rows"]),
    "CSV with a header only": (f"{ROWS}{{d}}/header.csv", ["header.csv", "has no rows"]),
    "CSV without a header": (f"{ROWS}{{d}}/bare.csv", ["bare.csv:1", "must name the columns"]),
    "CSV with a short row": (f"{ROWS}{{d}}/short.csv", ["short.csv:3", "1 values for 2 columns"]),
    "CSV in Latin-1": (f"{ROWS}{{d}}/latin.csv", ["latin.csv:2", "0xe9", "iconv"]),
    "CSV in UTF-16": (f"{ROWS}{{d}}/utf16.csv", ["utf16.csv:1", "UTF-16", "iconv"]),
    "CSV with NUL bytes": (f"{ROWS}{{d}}/nul.csv", ["nul.csv:2", "NUL"]),
    "CSV that is compressed": (f"{ROWS}{{d}}/gzip.csv", ["gzip.csv:1", "gunzip"]),
    "CSV whose name says that it is compressed": (f"{ROWS}{{d}}/rows.csv.gz", ["gunzip"]),
    "pattern of files": (f"{ROWS}{{d}}/*.jsonl", ["*.jsonl is a pattern", "data.train=["]),
    "learning rate of another project": (
        f"{TRAIN} --set training.lr=1",
        ["training.lr", "did you mean 'training.learning_rate'"],
    ),
    "epochs": (f"{TRAIN} --set training.epochs=1", ["did you mean 'training.rounds'"]),
    "batch size": (f"{TRAIN} --set batch_size=1", ["did you mean 'training.mini_batch'"]),
    "labels that are all different": (
        f"{ROWS}{{d}}/unique.csv",
        ["unique.csv", "each of the 3", "data.label_column"],
    ),
    "data with a warning, if strict": (
        f"{ROWS}{{d}}/alike.csv --strict",
        ["data.strict", "alike.csv", "'A' (", "'a' ("],
    ),
    "CSV that is a workbook": (f"{ROWS}{{d}}/zip.csv", ["zip.csv:1", "save it as CSV"]),
    "CSV with one row": (f"{ROWS}{{d}}/one.csv", ["one.csv", "data.held_out"]),
    "CSV with one label": (f"{ROWS}{{d}}/same.csv", ["same.csv", "'same'", "at least 2"]),
    "JSON that is an array": (f"{ROWS}{{d}}/array.jsonl", ["array.jsonl:1", "in each line"]),
    "JSON over many lines": (f"{ROWS}{{d}}/pretty.jsonl", ["pretty.jsonl:1", "in each line"]),
    "JSON with NUL bytes": (f"{ROWS}{{d}}/nul.jsonl", ["nul.jsonl:1", "NUL"]),
    "JSON that is too deep": (f"{ROWS}{{d}}/deep.jsonl", ["deep.jsonl:1", "JSON"]),
    "JSON with a null label": (f"{ROWS}{{d}}/null.jsonl", ["null.jsonl:1", "'label'"]),
    "a very long line": (f"{ROWS}{{d}}/long.jsonl", ["long.jsonl:1", "4194304"]),
    "Parquet that is cut off": (f"{ROWS}{{d}}/cut.parquet", ["cut.parquet", "Parquet"]),
    "TSV with commas": (f"{ROWS}{{d}}/commas.tsv", ["commas.tsv:1", ".csv"]),
    "one of two parallel files": (f"{PAIRS}{{d}}/a.txt", ["a.txt", "SOURCE,TARGET"]),
    "three parallel files": (f"{PAIRS}{{d}}/a.txt,{{d}}/a.txt,{{d}}/a.txt", ["SOURCE,TARGET"]),
    "text that is binary": (f"{TEXTS}{{d}}/binary.txt", ["binary.txt:1", "UTF-8"]),
    "text without text": (f"{TEXTS}{{d}}/blank.txt", ["blank.txt"]),
    "chat without an answer": (f"{ANSWERS}{{d}}/chat.jsonl", ["chat.jsonl:1", "'user'"]),
    "prompt without an answer": (f"{ANSWERS}{{d}}/prompt.jsonl", ["prompt.jsonl:1", "completion"]),
    # Where nothing is up.
    **{line: (line, ["no testbed"]) for line in NEED_TESTBED},
    **{line: (line, ["no scheduler", "collapipe up"]) for line in ("watch", "trace", "targets t")},
    "prune without a number": ("jobs prune", ["--keep"]),
    "prune a negative number": ("jobs prune --keep -1", ["--keep", "greater than or equal to 0"]),
    "plan of round 0": ("plan show 0", ["ROUND", "the number of a round"]),
    "plan of a word": ("plan explain last", ["ROUND", "name a job with"]),
    "predict without a text": ("predict x", ["no text", 'collapipe predict x "a text"']),
    "evaluate without data": ("evaluate x", ["--data"]),
    "rollback to a negative round": ("rollback x -- -1", ["ROUND", "greater than or equal to 0"]),
    "report onto a file": ("jobs report x {d}/blank.txt", ["blank.txt exists", "--overwrite"]),
    "log of nothing": ("logs device-0-0", ["no log of 'device-0-0'", "nothing was started"]),
    "shape without a testbed": ("testbed shape device-0-0 wifi", ["no testbed", "--emulation"]),
    # A scheduler that is not there, and certificates.
    "no security": ("status --scheduler 127.0.0.1:9", ["--insecure", "collapipe certs"]),
    "not an address": ("status --scheduler nowhere", ["--scheduler nowhere", "HOST:PORT"]),
    "URL as address": ("status --scheduler http://a:1", ["http://a:1", "HOST:PORT"]),
    "nobody listens": (f"status {NOBODY}", ["127.0.0.1:9 cannot be reached", "check"]),
    "host that does not exist": ("status --scheduler no.invalid:9 --insecure", ["no.invalid:9"]),
    "train where nobody listens": (f"{TRAIN} {NOBODY}", ["127.0.0.1:9 cannot be reached"]),
    "watch where nobody listens": (f"watch x {NOBODY}", ["127.0.0.1:9 cannot be reached"]),
    "plain text and TLS": (f"status {NOBODY} --tls-ca {{d}}/job.toml", ["leave one out"]),
    "certificate that is not there": (
        "status --scheduler a:1 --tls-ca x --tls-cert x --tls-key x",
        ["--tls-ca x", "no such file", "collapipe certs issue"],
    ),
    "certificate that is none": (
        "status --scheduler a:1 --tls-ca {d}/job.toml --tls-cert {d}/job.toml --tls-key {d}/job.toml",
        ["job.toml", "certificate"],
    ),
    "unknown context": ("status --context lab", ["no context 'lab'", "collapipe context add lab"]),
    "context and address": (f"status --context lab {NOBODY}", ["contradict", "leave one out"]),
    "context without an address": ("context add lab", ["--scheduler", "collapipe context add"]),
    "context without security": ("context add lab --scheduler h:1", ["--insecure"]),
    "certificate of no role": ("certs issue {d}/ca boss:me", ["boss", "scheduler"]),
    "no authority": ("certs issue {d}/ca scheduler:s", ["ca", "collapipe certs init"]),
    "list of no authority": ("certs list {d}/ca", ["ca", "collapipe certs init"]),
    "token for no time": (
        "certs token {d}/ca client:me --scheduler a:1 --authority a:2 --valid soon",
        ["--valid soon", "30m"],
    ),
    "not a token": ("join letmein --folder {d}/box", ["token", "collapipe certs token"]),
    "renew without a certificate": ("renew --folder {d}/box", ["box", "collapipe certs token"]),
    # The simulator and the estimate.
    "missing scenario": ("simulate none.toml", ["none.toml does not exist", "scenario"]),
    "scenario that is a job": ("simulate {d}/job.toml", ["job.toml", "unknown key"]),
    "no seeds": ("simulate {d}/job.toml --seeds 0", ["--seeds", "greater than or equal to 1"]),
    "missing run": ("fit none.jsonl", ["none.jsonl"]),
    "run that is data": ("fit {d}/good.jsonl", ["good.jsonl"]),
    "run that is empty": ("fit {d}/empty.csv", ["empty.csv"]),
    "run that is binary": ("fit {d}/binary", ["binary"]),
    "unknown box": ("plan estimate --preset demo --devices 2xpi9", ["pi9", "raspberry-pi-4"]),
    "no boxes": ("plan estimate --preset demo --devices 0xpi4", ["0xpi4"]),
    "box without a size": ("plan estimate --preset demo --devices pi4:much", ["much"]),
    "box on no link": ("plan estimate --preset demo --devices pi4@sneaker", ["sneaker", "wifi"]),
    "estimate without boxes": ("plan estimate --preset demo", ["--devices"]),
    "two control units": (
        "plan estimate --preset demo --devices pi4 --control-unit 2xpi4",
        ["--control-unit 2xpi4", "one box"],
    ),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with bad files of every kind."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "folder").mkdir()
    good = b"".join(
        b'{"text": "text %d", "label": "%s"}\n' % (i, b"ab"[i % 2 :][:1]) for i in range(40)
    )
    row = b"a text,a\n"
    contents = {
        "job.toml": b'name = "x"\n[task]\nkind = "classification"\n[data]\ntrain = "good.jsonl"\n',
        "broken.toml": b"a = 1\nrounds 3\n",
        "empty.toml": b"",
        "binary": bytes(range(256)) * 9,
        "huge.toml": b"# a comment\n" * 2_000_000,
        "deep.toml": b"a = " + b"[" * 100_000 + b"]" * 100_000,
        "unknown.toml": b'[task]\nkind = "ner"\n[training]\nround = 3\n',
        "good.jsonl": good,
        "empty.csv": b"",
        "header.csv": b"text,label\n",
        "bare.csv": row * 40,
        "short.csv": b"text,label\n" + row + b"alone\n" + row * 40,
        "latin.csv": "text,label\ncafé,a\n".encode("latin-1"),
        "utf16.csv": "text,label\na text,a\n".encode("utf-16"),
        "nul.csv": b"text,label\na\0text,a\n" + row * 40,
        "gzip.csv": gzip.compress(b"text,label\n" + row * 40),
        "zip.csv": b"PK\x03\x04" + bytes(range(256)),
        "one.csv": b"text,label\n" + row,
        "same.csv": b"text,label\n" + b"".join(b"text %d,same\n" % i for i in range(200)),
        "rows.csv.gz": gzip.compress(b"text,label\n" + row * 40),
        "unique.csv": b"text,label\n" + b"".join(b"text %d,label %d\n" % (i, i) for i in range(3)),
        "alike.csv": b"text,label\n"
        + b"".join(b"text %d,%s\n" % (i, b"aA"[i % 2 :][:1]) for i in range(90)),
        "array.jsonl": b"[" + good.replace(b"\n", b",") + b"{}]",
        "pretty.jsonl": json.dumps([{"text": "a", "label": "b"}], indent=1).encode(),
        "nul.jsonl": b"\0" * 4096,
        "deep.jsonl": b"[" * 100_000 + b"\n",
        "null.jsonl": b'{"text": "a", "label": null}\n',
        "long.jsonl": b'{"text": "' + b"a" * 5_000_000 + b"\n",
        "cut.parquet": b"PAR1" + bytes(200),
        "commas.tsv": b"text,label\n" + row * 40,
        "a.txt": b"one\n",
        "binary.txt": bytes(range(128, 256)),
        "blank.txt": b"\n\n",
        "chat.jsonl": b'{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}\n',
        "prompt.jsonl": b'{"prompt": "a"}\n',
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def taken_address() -> Iterator[str]:
    """Returns an address at which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def run(line: str) -> Result:
    return CliRunner().invoke(app, shlex.split(line), input="")


_START = subprocess.Popen


def _refuse_to_start(arguments: list[str], **options: Any) -> Any:
    """Starts nothing but the process that reads tables."""
    if "collapipe.data.table_process" in arguments:
        return _START(arguments, **options)
    raise AssertionError("a testbed would start although the input is wrong")


def check_refused(result: Result, expected: list[str]) -> None:
    """Checks that a command has failed with one clear message."""
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert result.exit_code in (1, 2), result.output
    assert "Traceback" not in result.output
    for part in expected:
        assert part in result.output, result.output
    lines = [line for line in result.output.splitlines() if line.strip(" │")]
    assert len(set(lines)) == len(lines), f"a line comes twice: {result.output}"
    assert len(result.output) < 3000, "the message is too long to be read"


@pytest.mark.parametrize("mistake", CASES)
def test_mistake_is_answered_with_one_clear_message(
    mistake: str,
    files: Path,
    taken_address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subprocess, "Popen", _refuse_to_start)
    line, expected = CASES[mistake]
    result = run(line.format(d=files, taken=taken_address))
    check_refused(result, [part.format(taken=taken_address) for part in expected])
    assert not (tmp_path / ".collapipe" / "testbed.json").exists()


def test_user_without_a_home_can_work_but_keep_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", Mock(side_effect=KeyError))
    assert "nothing is up here" in run("status").stdout
    check_refused(run("context add lab --scheduler a:1 --insecure"), ["XDG_CONFIG_HOME"])


@pytest.mark.parametrize(
    ("file", "contents"),
    [
        (".collapipe/testbed.json", ["{", "[]", '{"detached": "?", "shape": 3}', "\0"]),
        ("collapipe/contexts.json", ["{", "[]", '{"used": 3}', '{"by_name": {"a": {}}}']),
    ],
)
def test_damaged_file_is_named(file: str, contents: list[str], tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir()
    for content in contents:
        (tmp_path / file).write_text(content)
        check_refused(run("status"), [Path(file).name, "delete it"])


def test_second_command_in_a_workspace_names_the_first_one() -> None:
    with Workspace(Path(".collapipe")).locked():
        check_refused(run("up"), [f"pid {os.getpid()}", "--workspace DIR"])


@pytest.mark.parametrize("line", ["up", "context add lab --scheduler a:1 --insecure"])
def test_full_disk_is_named(line: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        result = run(line)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    check_refused(result, ["cannot be written", "File too large"])


def test_error_of_a_file_names_it_with_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    for number, remedy in ((errno.ENOSPC, "make room"), (errno.EROFS, "may read and write")):
        with pytest.raises(typer.Exit) as ended, exit_codes(as_json=False):
            raise OSError(number, os.strerror(number), "/disk/file")
        assert ended.value.exit_code == 1
        message = capsys.readouterr().err
        assert "/disk/file" in message and remedy in message
