"""Gives each function that reads bytes the inputs that atheris finds by code coverage.

    python -m benchmarks.fuzz_readers --seconds 60

Prints a table in Markdown. A reader fails if it raises an unexpected error, takes more than 10 s, or the process exceeds 2 GB of
memory. The exit status is then 1. Atheris has wheels for Linux on x86-64
only.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["collapipe"]):
    from benchmarks.fuzz import readers
    from collapipe.errors import CollapipeError


def main() -> None:
    """Runs each reader in a process of its own, because atheris ends the process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=int, default=60, help="Time for each reader.")
    parser.add_argument("--reader", action="append", help="Run this one; default: all.")
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if options.in_this_process:
            fuzz(Path(name), options.reader[0], options.seconds)
        names = options.reader or [reader for reader, _ in readers(Path(name))]
    print(
        "| reader | inputs | places in the code reached | inputs that reached new ones | MB at the start | MB at the end |"
    )
    print("|---|---|---|---|---|---|")
    failed = False
    for reader in names:
        line = [*("--reader", reader), *("--seconds", str(options.seconds)), "--in-this-process"]
        ended = subprocess.run(
            [sys.executable, "-m", "benchmarks.fuzz_readers", *line], capture_output=True, text=True
        )
        done = re.search(r"#(\d+)\s+DONE\s+cov: (\d+) .*corp: (\d+)", ended.stderr)
        memory = re.findall(r"rss: (\d+)Mb", ended.stderr)
        if ended.returncode or not done:
            failed = True
            print(f"{reader} failed:\n{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}")
        else:
            cells = [reader, *done.groups(), memory[0], memory[-1]]
            print(f"| {' | '.join(cells)} |", flush=True)
    sys.exit(failed)


def fuzz(folder: Path, name: str, seconds: int) -> None:
    """Lets one reader read, and ends this process."""
    read, samples, allowed = dict(readers(folder))[name]
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, sample in enumerate(samples):
        (corpus / str(number)).write_bytes(sample)

    def read_one(data: bytes) -> None:
        try:
            read(data)
        except (CollapipeError, *allowed):
            pass

    limits = [f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=2000", "-max_len=20000"]
    atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={folder}/", str(corpus)], read_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
