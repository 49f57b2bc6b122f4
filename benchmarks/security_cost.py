"""What mutual TLS and signed plans cost: the same jobs on two deployments of two devices, one of them with plain text.

    python -m benchmarks.security_cost --repeats 5

All processes run on this machine, over loopback. The two deployments take turns, so that only one computes at a time. The first round
of a job is left out, because it connects the hosts. Loopback has no delay, and both ends share the same cores.
So the cost shows more here than over a real link.

Prints a table in Markdown with the medians of a round.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from integration.secured import SecuredDeployment  # noqa: E402
from reference.tiny_jobs import make_job  # noqa: E402

from collapipe.job import JobConfig  # noqa: E402
from collapipe_client import CollaPipeClient, LocalTestbed  # noqa: E402

SIZES = {"small": 64, "large": 512}
"""Width of the model."""
NUM_ROUNDS = 6


def main() -> None:
    """Runs the jobs, and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = {size: _job(folder / size, width) for size, width in SIZES.items()}
        with (
            SecuredDeployment(folder / "secured") as secured,
            LocalTestbed([2], folder / "plain", insecure=True) as plain,
            secured.client() as of_secured,
            plain.client() as of_plain,
        ):
            plain.wait_until_registered()
            deployments = {"plain text": of_plain, "mutual TLS": of_secured}
            print(
                "| model | deployment | round, s | training, s | samples/s |\n|---|---|---|---|---|"
            )
            for size, job in jobs.items():
                seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in deployments}
                for _ in range(options.repeats):
                    for deployment, client in deployments.items():
                        seconds[deployment] += _run(client, job)
                for deployment, rounds in seconds.items():
                    whole, training = map(statistics.median, zip(*rounds, strict=True))
                    samples = job.training.local_steps * job.training.mini_batch
                    print(
                        f"| {size} | {deployment} | {whole:.3f} | {training:.3f} | {samples / whole:.1f} |",
                        flush=True,
                    )


def _job(folder: Path, width: int) -> JobConfig:
    return make_job(
        folder,
        num_blocks=4,
        num_rows=(256,),
        model_config={
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_attention_heads": 4,
        },
        training={"rounds": NUM_ROUNDS, "local_steps": 8, "mini_batch": 16},
        schedule={"strategy": "pipeline"},
        devices_per_cluster=2,
    )


def _run(client: CollaPipeClient, job: JobConfig) -> list[tuple[float, float]]:
    """Returns the seconds of each round but the first, and those of its training."""
    seconds = []
    for event in client.watch(client.submit(job)):
        if event.HasField("round_committed"):
            committed = event.round_committed
            seconds.append((committed.round_seconds, committed.summaries[0].training_seconds))
    return seconds[1:]


if __name__ == "__main__":
    main()
