"""Tests the device agent on arm64: its packages, and training together with services on x86-64."""

import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from importlib.metadata import distributions
from pathlib import Path

import pytest
from integration.running import FinishedJob, run_job
from packaging.utils import canonicalize_name
from reference.federated_job import train_job
from reference.tiny_jobs import make_job
from torch import Tensor

from collapipe.certificates import Identity, Role
from collapipe.job import JobConfig
from collapipe_client import LocalTestbed
from collapipe_client.processes import last_lines
from containers.arm64.environment import PROCESSORS, Arm64, ensure_arm64

pytestmark = pytest.mark.timeout(900)

MEGABYTE = 1e6
MOST_MEGABYTES = 75.0
"""Largest allowed size of all wheels except torch's."""
UNWANTED = ("cvxpy", "scipy", "pandas", "pyarrow", "datasets", "nvidia", "triton", "cuda")
"""Prefixes of packages that a device must not need: solvers, data frames, CUDA."""
RELATIVE = 5e-6
"""Allowed relative difference of losses and gradient norms between architectures. 1e-8 was measured."""
ABSOLUTE = 5e-6
"""Allowed difference of weights. 5e-7 was measured. One update changes a weight by about 1e-2."""
START_SECONDS = 180.0
END_SECONDS = 60.0


@pytest.fixture(scope="module")
def arm64() -> Arm64:
    return ensure_arm64()


def test_locks_of_a_device_install_for_aarch64(arm64: Arm64) -> None:
    for wheel in arm64.wheels:
        assert any(tag.platform == "any" or "aarch64" in tag.platform for tag in wheel.tags), wheel
    found = {
        canonicalize_name(distribution.name): distribution.version
        for distribution in distributions(path=[str(arm64.site)])
    }
    assert found == {wheel.name: wheel.version for wheel in arm64.wheels}
    assert [name for name in found if name.startswith(UNWANTED)] == []
    sizes = {wheel.name: wheel.size_bytes / MEGABYTE for wheel in arm64.wheels}
    torch_size, others = sizes.pop("torch"), sum(sizes.values())
    print(f"torch {torch_size:.1f} MB, {len(sizes)} other wheels {others:.1f} MB")
    assert others < MOST_MEGABYTES, sorted(sizes.items(), key=lambda item: -item[1])


@pytest.mark.parametrize("device", PROCESSORS)
def test_torch_runs_on_processor(arm64: Arm64, device: str) -> None:
    script = (
        "import platform, torch; print(platform.machine(), torch.__version__, torch.ones(9).sum())"
    )
    (version,) = (wheel.version for wheel in arm64.wheels if wheel.name == "torch")
    assert arm64.run("-c", script, device=device) == f"aarch64 {version}+cpu tensor(9.)"


def test_arm64_agents_train_as_x86_64_does(arm64: Arm64, tmp_path: Path) -> None:
    with LocalTestbed([1], tmp_path / "testbed") as testbed:
        testbed.wait_until_registered()
        expected = run_job(testbed, tiny_job(tmp_path, [3]))
        with emulated_agents(arm64, testbed, tmp_path / "agents"):
            # Emulated processors are ten times slower.
            finished = run_job(testbed, tiny_job(tmp_path, [1, 1, 1]), limit_seconds=600)
        with testbed.client() as client:
            metrics = [client.find_job(job.job_id).evaluation for job in (expected, finished)]

    assert computing_hosts(expected) == {"device-0-0"}
    assert computing_hosts(finished) == {"device-0-0", *PROCESSORS}
    losses, weights = finished.losses(0), finished.weights()
    assert losses == pytest.approx(expected.losses(0), rel=RELATIVE)
    assert gradient_norms(finished) == pytest.approx(gradient_norms(expected), rel=RELATIVE)
    assert metrics[0] == metrics[1]
    assert metrics[0].num_rounds == expected.job.training.rounds
    assert largest_distance(weights, expected.weights()) < ABSOLUTE
    # The tolerances are strict: they reject a training whose learning rate is 1 % larger.
    other = train_job(tiny_job(tmp_path, [3], learning_rate=1.01e-2))
    assert losses != pytest.approx(other.losses[0], rel=RELATIVE)
    assert largest_distance(weights, other.weights) > 10 * ABSOLUTE


def tiny_job(directory: Path, segments: Sequence[int], **training: object) -> JobConfig:
    """Makes a job of two rounds of two steps, with an evaluation in every round."""
    return make_job(
        directory / "data",
        devices_per_cluster=len(segments),
        training={"evaluate_every": 1, **training},
        schedule={"strategy": "manual", "segments": [segments], "silence_seconds": 120},
    )


def computing_hosts(finished: FinishedJob) -> set[str]:
    """Returns the hosts that computed blocks, and checks that they were the same in each round."""
    hosts = [
        {s.host_id for s in summary.stages[1:-1] if s.times.ByteSize()}
        for (summary,) in finished.summaries
    ]
    assert hosts == hosts[:1] * finished.job.training.rounds
    return hosts[0]


def gradient_norms(finished: FinishedJob) -> list[float]:
    """Returns the gradient norm of each step, to which every stage contributes."""
    return [norm for (summary,) in finished.summaries for norm in summary.gradient_norms]


def largest_distance(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Returns the largest difference of any weight between two models."""
    assert actual.keys() == expected.keys()
    return max(float((actual[name] - expected[name]).abs().max()) for name in expected)


@contextmanager
def emulated_agents(arm64: Arm64, testbed: LocalTestbed, directory: Path) -> Iterator[None]:
    """Runs an agent on each emulated processor. In the end, each must drain and exit with status 0."""
    directory.mkdir()
    with ExitStack() as running:
        agents = {
            device: running.enter_context(_agent(arm64, testbed, device, directory / device))
            for device in PROCESSORS
        }
        deadline = time.monotonic() + START_SECONDS
        with testbed.client() as client:
            while not {s.host.host_id for s in client.hosts() if s.alive}.issuperset(agents):
                for device, agent in agents.items():
                    failure = f"{device} did not register:\n{last_lines(directory / device)}"
                    assert agent.poll() is None and time.monotonic() < deadline, failure
                time.sleep(0.1)
        yield
        for agent in agents.values():
            agent.terminate()
        for device, agent in agents.items():
            assert agent.wait(END_SECONDS) == 0, last_lines(directory / device)


@contextmanager
def _agent(
    arm64: Arm64, testbed: LocalTestbed, device: str, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    certificates = testbed.workspace.certificates
    certificates.issue({Identity(Role.DEVICE_AGENT, device): ()}, timedelta(days=1))
    options = ["--host-id", device, *certificates.options(device)]
    options += ["--scheduler", testbed.scheduler_address]
    options += ["--exit-with-parent", str(os.getpid())]
    command = arm64.python("-m", "collapipe.device_agent", *options, device=device)
    with log.open("wb") as output:
        agent = subprocess.Popen(
            command, env=arm64.environment(), stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield agent
    finally:
        agent.kill()
        agent.wait()
