"""What does the user see after five everyday accidents? Provokes each with real processes, and prints what commands say.

    python -m benchmarks.accidents
    python -m benchmarks.accidents --only "full disk" "out of memory"

A device is unplugged, the disk of a control unit is full, the clock of the scheduler is wrong, a certificate expires, or the
kernel gives a device no more memory. For each accident, this prints the output of `collapipe status` some seconds later, and
the lines of `collapipe watch` from the accident until the job has gone on. `collapipe train` prints the same lines. Each
service has a network namespace of its own, as in benchmarks/chaos.py, except for the certificate. Needs root.
"""

import argparse
import datetime
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from benchmarks.chaos import DEVICES, Fault, disturb, small_disks
from benchmarks.namespaced_testbed import NamespacedTestbed, isolate

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from faults.interrupted import make_interruptible_job  # noqa: E402
from integration.secured import SecuredDeployment  # noqa: E402
from reference.tiny_jobs import make_job  # noqa: E402

from collapipe.certificates import Identity, Role  # noqa: E402
from collapipe.certificates.authority_folder import AuthorityFolder  # noqa: E402
from collapipe.certificates.pki import utc_now  # noqa: E402
from collapipe.errors import CollapipeError  # noqa: E402
from collapipe.job import JobConfig  # noqa: E402
from collapipe_client import CollaPipeClient  # noqa: E402

_NOTICED_SECONDS = 20.0
"""From the accident to `collapipe status`: the silence deadline of the job, and lost heartbeats."""
_GOES_ON_SECONDS = 25.0
_LIFETIME = datetime.timedelta(seconds=60)
"""Of the certificate that expires. Its process must have started before."""
_MORE_BYTES = 1 << 20
"""Memory that a device may still allocate."""
_DEVICE = "device-0-1"


def unplug(testbed: NamespacedTestbed) -> Callable[[], None]:
    testbed.unplug(_DEVICE)
    return lambda: testbed.plug_in(_DEVICE)


def fill_disk(testbed: NamespacedTestbed) -> Callable[[], None]:
    filler = testbed.workspace.state / "control-unit-0" / "filler"
    has_ended = threading.Event()

    def fill() -> None:
        # Space that the control unit frees is taken again, as by a program that writes a log.
        with open(filler, "wb", buffering=0) as file:
            while not has_ended.wait(0.01):
                with suppress(OSError):
                    while True:
                        file.write(bytes(4096))

    filling = threading.Thread(target=fill)
    filling.start()

    def make_room() -> None:
        has_ended.set()
        filling.join()
        filler.unlink()

    return make_room


def set_clock(testbed: NamespacedTestbed) -> Callable[[], None]:
    return disturb(testbed, Fault("clock a day ahead", "scheduler", 0.0, 0.0))


def limit_memory(testbed: NamespacedTestbed) -> Callable[[], None]:
    pid = next(process.pid for process in testbed.processes if process.name == _DEVICE)
    before = resource.prlimit(pid, resource.RLIMIT_AS)
    limit = psutil.Process(pid).memory_info().vms + _MORE_BYTES
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, before[1]))
    return lambda: resource.prlimit(pid, resource.RLIMIT_AS, before) and None


ACCIDENTS: dict[str, Callable[[NamespacedTestbed], Callable[[], None]]] = {
    "unplugged device": unplug,
    "full disk": fill_disk,
    "wrong clock": set_clock,
    "out of memory": limit_memory,
}
"""Each begins an accident, and returns a function that ends it."""
CERTIFICATE = "expired certificate"


class _ShortLived(SecuredDeployment):
    """A deployment in which the certificate of device-0-0 expires soon."""

    def files(self, name: str) -> Sequence[str]:
        if name == "device-0-0":
            self.replace_certificate(utc_now, _LIFETIME)
        return super().files(name)

    def replace_certificate(
        self, clock: Callable[[], datetime.datetime], lifetime: datetime.timedelta
    ) -> None:
        """Gives device-0-0 another certificate. `clock` says when it begins."""
        # A certificate that is not due is replaced only for another address.
        hosts = [f"127.0.0.{9 + lifetime.days}"]
        holder = Identity(Role.DEVICE_AGENT, "device-0-0")
        authority = AuthorityFolder(self.authority, clock)
        authority.issue(holder, hosts, self.authority / "issued" / "device-0-0", lifetime)


@contextmanager
def watched(client: CollaPipeClient, job: JobConfig, endpoint: Sequence[str]) -> Iterator[Path]:
    """Runs a job until the end of the block. Yields the file with the lines of `collapipe watch`."""
    job_id = client.submit(job)
    with tempfile.NamedTemporaryFile("wb", suffix=".log") as log:
        line = [sys.executable, "-m", "collapipe_client", "watch", job_id, *endpoint]
        watching = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield Path(log.name)
        finally:
            with suppress(CollapipeError):  # It may have ended already.
                client.cancel(job_id)
            watching.wait()


def tell(name: str, endpoint: Sequence[str], log: Path, end: Callable[[], object]) -> None:
    """Prints what the user sees, from now until the accident has ended and the job goes on."""
    seen = len(log.read_text().splitlines())
    time.sleep(_NOTICED_SECONDS)
    line = [sys.executable, "-m", "collapipe_client", "status", *endpoint]
    environment = os.environ | {"COLUMNS": "400"}
    status = subprocess.run(line, capture_output=True, text=True, check=False, env=environment)
    end()
    time.sleep(_GOES_ON_SECONDS)
    print(f"\n## {name}\n\n`collapipe status`:\n\n{status.stdout}{status.stderr}")
    print("`collapipe watch`:\n")
    print("\n".join(log.read_text().splitlines()[seen:]), flush=True)


def wait_for_commits(log: Path, count: int) -> None:
    """Waits until `collapipe watch` has reported commits."""
    while log.read_text().count(" committed in ") < count:
        time.sleep(0.2)


def expire(folder: Path) -> None:
    """Runs a job after the certificate of device-0-0 has expired, and then starts that device again."""
    with _ShortLived(folder) as deployment, deployment.client() as client:
        born = time.monotonic()
        endpoint = ["--scheduler", deployment.addresses["scheduler"], *deployment.files("me")]
        time.sleep(max(0.0, born + _LIFETIME.total_seconds() - time.monotonic()))
        job = make_job(folder, training={"rounds": 100000}, schedule={"silence_seconds": 5})
        with watched(client, job, endpoint) as log:
            tell(CERTIFICATE, endpoint, log, lambda: None)
        line = [sys.executable, "-m", "collapipe.device_agent", *endpoint[:2]]
        line += SecuredDeployment.files(deployment, "device-0-0")
        days = datetime.timedelta(days=3)
        for title, change in (
            ("the device itself, when it is started again", lambda: None),
            (
                "the same if the clock of its box is 3 days behind",
                lambda: deployment.replace_certificate(lambda: utc_now() + days, days),
            ),
        ):
            change()
            started = subprocess.run(line, capture_output=True, text=True, check=False)
            print(f"\n{title}:\n\n{started.stdout}{started.stderr}", flush=True)


def main() -> None:
    """Provokes the accidents."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [*ACCIDENTS, CERTIFICATE]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="ACCIDENT")
    options = parser.parse_args()
    isolate("benchmarks.accidents")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if CERTIFICATE in options.only:
            (folder / "secured").mkdir()
            expire(folder / "secured")
        accidents = [name for name in options.only if name in ACCIDENTS]
        if not accidents:
            return
        with (
            small_disks(folder / "testbed"),
            NamespacedTestbed(DEVICES, folder / "testbed") as testbed,
            testbed.client() as client,
        ):
            testbed.wait_until_registered()
            endpoint = testbed.endpoint_options
            for accident in accidents:
                job = make_interruptible_job(folder, training={"rounds": 100000})
                with watched(client, job, endpoint) as log:
                    wait_for_commits(log, 2)
                    tell(accident, endpoint, log, ACCIDENTS[accident](testbed))
                testbed.wait_until_registered()


if __name__ == "__main__":
    main()
