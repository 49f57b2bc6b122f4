"""What mutual TLS and signed plans cost, and what secure averaging costs: the same jobs with and without, in turns.

    python -m benchmarks.security_cost --repeats 5
    python -m benchmarks.security_cost --repeats 5 --secure-averaging

The first command compares two deployments of two devices, one of them with plain text. The second one compares jobs on one deployment
with mutual TLS and three clusters of one device (the first cluster has two, and uses one).

All processes run on this machine, over loopback. The jobs take turns, so that only one computes at a time. The first round
of a job is left out, because it connects the hosts. Loopback has no delay, and both ends share the same cores.
So the cost shows more here than over a real link.

Prints a table in Markdown with the medians of a round.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from integration.secured import SecuredDeployment  # noqa: E402
from reference.tiny_jobs import make_job  # noqa: E402

from collapipe.job import JobConfig  # noqa: E402
from collapipe_client import CollaPipeClient, LocalTestbed  # noqa: E402

SIZES = {"small": 64, "large": 512}
"""Width of the model."""
NUM_ROUNDS = 6


@dataclass(frozen=True)
class Round:
    """What a round took. The training is that of cluster 0, and the bytes are those of all clusters."""

    seconds: float
    training_seconds: float
    pushed_bytes: int


Case = tuple[CollaPipeClient, Mapping[str, Any]]
"""A deployment, and what its jobs differ in from those of other cases."""


def main() -> None:
    """Runs the jobs, and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--secure-averaging", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        opened = _averaging_cases if options.secure_averaging else _tls_cases
        with opened(folder) as cases:
            print(
                "| model | case | round, s | training, s | samples/s | pushed, MB |\n|---|---|---|---|---|---|"
            )
            for size, width in SIZES.items():
                _print_rows(folder, size, width, cases, options.repeats)


@contextmanager
def _tls_cases(folder: Path) -> Iterator[dict[str, Case]]:
    with ExitStack() as stack:
        secured = stack.enter_context(SecuredDeployment(folder / "secured"))
        plain = stack.enter_context(LocalTestbed([2], folder / "plain", insecure=True))
        plain.wait_until_registered()
        job = {"num_rows": (256,), "devices_per_cluster": 2}
        yield {
            "plain text": (stack.enter_context(plain.client()), job),
            "mutual TLS": (stack.enter_context(secured.client()), job),
        }


@contextmanager
def _averaging_cases(folder: Path) -> Iterator[dict[str, Case]]:
    with (
        SecuredDeployment(folder / "secured", num_clusters=3) as secured,
        secured.client() as client,
    ):
        job = {"num_rows": (256, 256, 256), "devices_per_cluster": 1}
        yield {
            "plain average": (client, job),
            "secure average": (client, {**job, "averaging": {"secure": True}}),
        }


def _print_rows(
    folder: Path, size: str, width: int, cases: Mapping[str, Case], repeats: int
) -> None:
    found: dict[str, list[Round]] = {name: [] for name in cases}
    jobs = {name: _job(folder / size, width, job) for name, (_, job) in cases.items()}
    for _ in range(repeats):
        for name, (client, _) in cases.items():
            found[name] += _run(client, jobs[name])
    for name, rounds in found.items():
        whole = statistics.median(each.seconds for each in rounds)
        training = statistics.median(each.training_seconds for each in rounds)
        pushed = statistics.median(each.pushed_bytes for each in rounds) / 1e6
        job = jobs[name]
        samples = job.clusters * job.training.local_steps * job.training.mini_batch
        print(
            f"| {size} | {name} | {whole:.3f} | {training:.3f} | {samples / whole:.1f} | {pushed:.3f} |",
            flush=True,
        )


def _job(folder: Path, width: int, overrides: Mapping[str, Any]) -> JobConfig:
    return make_job(
        folder,
        num_blocks=4,
        model_config={
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_attention_heads": 4,
        },
        training={"rounds": NUM_ROUNDS, "local_steps": 8, "mini_batch": 16},
        schedule={"strategy": "pipeline"},
        **overrides,
    )


def _run(client: CollaPipeClient, job: JobConfig) -> list[Round]:
    """Returns what each round but the first took."""
    rounds = []
    for event in client.watch(client.submit(job)):
        if event.HasField("round_committed"):
            summaries = event.round_committed.summaries
            rounds.append(
                Round(
                    event.round_committed.round_seconds,
                    summaries[0].training_seconds,
                    sum(pushed.bytes for summary in summaries for pushed in summary.pushed),
                )
            )
    return rounds[1:]


if __name__ == "__main__":
    main()
