"""Measures image sizes, the memory of the idle compose testbed, and the time until its first round.

    python -m benchmarks.deployment

Needs Docker, or root and Debian's docker.io (see tests/containers). It builds the images, starts the testbed
with all its layers as a user does, and trains the first round of a small job. Folders, ports and tags differ
from those of a user.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from containers.compose import LAYERS, ComposeTestbed
from containers.compose_jobs import Job, write_rows
from containers.engine import Engine, docker_engine
from containers.engine_images import TARGETS, build_images, tag

IDLE_SECONDS = 30.0


def image_sizes(engine: Engine) -> dict[str, tuple[str, str, str]]:
    """Returns the total size of each image, the size of its shared layers, and that of its own layers."""
    table = engine.run("system", "df", "--verbose", "--format", "{{json .Images}}")
    rows = {f"{row['Repository']}:{row['Tag']}": row for row in json.loads(table)}
    return {
        target: tuple(rows[tag(target)][key] for key in ("Size", "SharedSize", "UniqueSize"))
        for target in TARGETS
    }


def memory(testbed: ComposeTestbed) -> dict[str, str]:
    """Returns the memory in use by each container."""
    lines = testbed.engine.run(
        "stats", "--no-stream", "--format", "{{.Name}} {{.MemUsage}}", *testbed.containers()
    ).splitlines()
    named = (line.split() for line in lines)
    # The container that issues certificates has ended, so it uses no memory.
    return {name.split("_")[1]: used for name, used, *_ in named if used != "0B"}


def first_round_seconds(testbed: ComposeTestbed) -> tuple[float, float]:
    """Returns the seconds from `collapipe train`, and from the start of the job, to the first commit."""
    job = Job("first", rounds=1, evaluate_every=0)
    job.write(testbed.data, "/data")
    started = time.monotonic()
    with testbed.running_client("train", f"/data/{job.name}.toml", "--json") as client:
        assert client.stdout is not None
        for line in client.stdout:
            if '"event": "round_committed"' in line:
                return time.monotonic() - started, json.loads(line)["elapsed_seconds"]
    raise SystemExit("the job ended before its first round")


def main() -> None:
    """Runs all measurements and prints tables."""
    with docker_engine() as engine, tempfile.TemporaryDirectory(prefix="collapipe-") as name:
        started = time.monotonic()
        build_images(engine)
        print(f"images built in {time.monotonic() - started:.0f} s (with layers from the cache)")
        print("| image | size | shared | unique |\n|---|---|---|---|")
        for target, sizes in image_sizes(engine).items():
            print(f"| {target} | {' | '.join(sizes)} |")
        directory = Path(name)
        directory.chmod(0o755)
        testbed = ComposeTestbed(engine, directory, LAYERS)
        try:
            write_rows(testbed.data)
            healthy = testbed.up()
            time.sleep(IDLE_SECONDS)
            idle = memory(testbed)
            to_commit, of_job = first_round_seconds(testbed)
        finally:
            testbed.down()
    print(f"up to all {len(idle)} containers healthy: {healthy:.0f} s")
    print(f"train to first committed round: {to_commit:.0f} s, of which the job {of_job:.0f} s")
    print(f"up to first committed round: {healthy + to_commit:.0f} s")
    print("| container | idle memory |\n|---|---|")
    for container, used in sorted(idle.items()):
        print(f"| {container} | {used} |")


if __name__ == "__main__":
    main()
