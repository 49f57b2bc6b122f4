"""A whole CollaPipe on this machine: every service a process of its own, on loopback.

The scheduler starts first, for all others need its address; they start together, because each
spends seconds importing torch. Whatever was started is in the workspace's record before it is
waited for, so that nothing gets lost.
"""

import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from typing_extensions import Self

from collapipe.emulation.world import Emulation
from collapipe.errors import InvalidInputError, PeerLostError, WrongStateError
from collapipe.rpc import Security
from collapipe_client.client import CollaPipeClient
from collapipe_client.processes import (
    GRACE,
    ProcessRecord,
    check_free,
    child_environment,
    describe_exit,
    end_processes,
    kill_process,
    last_lines,
    start_mark,
)
from collapipe_client.testbed_processes import (
    LOOPBACK,
    SCHEDULER,
    Clusters,
    Service,
    command,
    services,
    spell_out,
)
from collapipe_client.workspace import (
    DEFAULT_ROOT,
    Workspace,
    WorkspaceRecord,
    read_json,
    replace_text,
)

_POLL_SECONDS = 0.05
_REPORT_SECONDS = 2.0


class LocalTestbed:
    """One scheduler, one edge server, and for each cluster a control unit and its devices.

    Ten lines train a model:

        from pathlib import Path
        from collapipe_client import LocalTestbed, load_preset

        job = load_preset("demo")
        with LocalTestbed(clusters=[3, 3]) as testbed:
            client = testbed.client()
            job_id = client.submit(job)
            for event in client.watch(job_id):
                print(event)
            client.export(job_id, Path("model"))

    Args:
        clusters: Each cluster: a number of devices, or its devices with their memory and speed.
        workspace: Folder of state, logs and records. State stays, so that a job can be resumed by
            the next testbed.
        emulation: Devices, links and radios that the hosts are to seem to be and to have, by their
            names (`device-0-1`, `control-unit-0`, `edge-server`); `None` emulates nothing.
        scheduler_options: Further flags of the scheduler, for example where Prometheus is.
        detached: True when the processes are to outlive this one; they end by `LocalTestbed.end`.
        listen: Address of the scheduler.
        start_timeout: Bounds the wait for all processes to serve.
        progress: Is told what is being waited for, and what went wrong but was mended.
    """

    def __init__(
        self,
        clusters: Clusters,
        workspace: Path = DEFAULT_ROOT,
        *,
        emulation: Emulation | None = None,
        scheduler_options: Sequence[str] = (),
        detached: bool = False,
        listen: str = LOOPBACK,
        start_timeout: timedelta = timedelta(seconds=180),
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.workspace = Workspace(workspace)
        self._clusters = spell_out(clusters)
        self._services = services(self._clusters, scheduler_options)
        self._emulation = emulation
        self._detached = detached
        self._listen = listen
        self._start_timeout = start_timeout
        self._progress = progress or (lambda message: None)
        self._popen: dict[str, subprocess.Popen[bytes]] = {}
        self._owned = ExitStack()
        shape = [[(d.memory_bytes, d.speed) for d in cluster] for cluster in self._clusters]
        self._record = WorkspaceRecord(detached, shape)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def scheduler_address(self) -> str:
        """Where the scheduler serves."""
        scheduler = self._record.process(SCHEDULER)
        if scheduler is None:
            raise WrongStateError("the testbed is not started: call start(), or use it in `with`")
        return scheduler.address

    @property
    def processes(self) -> tuple[ProcessRecord, ...]:
        """The processes, the scheduler first."""
        return self._record.processes

    def client(self) -> CollaPipeClient:
        """Opens a client of the scheduler."""
        return CollaPipeClient(self.scheduler_address, Security.insecure())

    def emulate(self, emulation: Emulation) -> None:
        """Changes the emulated world; the hosts notice before their next micro-batch.

        A device that was not emulated keeps the memory and watts that it registered.

        Raises:
            WrongStateError: The hosts were not started in an emulated world.
        """
        if not self.workspace.emulation_file.exists():
            raise WrongStateError(
                "the testbed was started without an emulated world: start it with "
                "LocalTestbed(..., emulation=Emulation())"
            )
        self._emulation = emulation
        self._write_emulation()

    @property
    def emulation(self) -> Emulation | None:
        """The emulated world, if there is one."""
        return self._emulation

    def start(self) -> None:
        """Starts the processes and waits until all serve.

        Of a detached testbed that is up, starts only what is missing.

        Raises:
            PeerLostError: A process ended while it started, or did not serve in time; all are
                ended again.
            WrongStateError: The workspace is in use.
        """
        with ExitStack() as owned:
            owned.enter_context(self.workspace.locked())
            self._take_over()
            missing = [service for service in self._services if not self._is_alive(service.name)]
            try:
                first = [service for service in missing if service.name == SCHEDULER]
                self._start_together(first)
                self._start_together([service for service in missing if service not in first])
            except BaseException:
                self._end([service.name for service in missing])
                raise
            if not self._detached:
                owned.callback(self._end, [service.name for service in self._services])
                self._owned = owned.pop_all()

    def wait_until_registered(self) -> None:
        """Waits until the scheduler knows every host, which is shortly after they serve.

        Raises:
            PeerLostError: Some did not register in time.
        """
        expected = {service.name for service in self._services} - {SCHEDULER}
        deadline = time.monotonic() + self._start_timeout.total_seconds()
        with self.client() as client:
            while missing := expected - {s.host.host_id for s in client.hosts() if s.alive}:
                if time.monotonic() > deadline:
                    raise PeerLostError(
                        min(missing),
                        f"{', '.join(sorted(missing))} did not register with the scheduler within "
                        f"{self._start_timeout.total_seconds():g} s: see {self.workspace.logs}",
                    )
                time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """Ends what was started here: SIGTERM, a bounded wait, SIGKILL.

        A detached testbed is left alone.
        """
        self._owned.close()

    def lost(self) -> list[str]:
        """Names the processes that have ended since they were started."""
        return [p.name for p in self._record.processes if not self._is_alive(p.name)]

    def describe_loss(self, name: str) -> str:
        """Says how a process ended, with the last lines of its log."""
        popen = self._popen.get(name)
        log = self.workspace.log_file(name)
        how = describe_exit(popen.poll() if popen else None)
        return f"{name} {how}; last lines of {log}:\n{last_lines(log)}"

    def kill(self, name: str) -> None:
        """Kills one process with SIGKILL, as a failing machine would."""
        kill_process(self._known(name))
        self._reap()

    def restart(self, name: str) -> None:
        """Starts an ended process again, at its former address, and waits until it serves."""
        self._known(name)
        service = next(service for service in self._services if service.name == name)
        self._spawn(service, log_mode="ab")
        self._wait_until_ready([service])

    @staticmethod
    def end(workspace: Path = DEFAULT_ROOT, grace: timedelta = GRACE) -> WorkspaceRecord | None:
        """Ends the detached testbed of a workspace.

        Returns:
            What was recorded; `None` when there was nothing.
        """
        folder = Workspace(workspace)
        if folder.read_record() is None:
            return None
        with folder.locked():
            record = folder.read_record()
            if record is not None:
                end_processes(record.processes, grace)
                folder.write_record(None)
            return record

    def _take_over(self) -> None:
        """Looks at what an earlier command left.

        Adopts a detached testbed, and ends the leftovers of a killed command.
        """
        earlier = self.workspace.read_record()
        if earlier is not None and earlier.alive:
            if not earlier.detached:
                self._progress(
                    f"ending {len(earlier.alive)} processes of a command that was killed"
                )
                end_processes(earlier.alive)
            elif not self._detached:
                raise WrongStateError(
                    f"a testbed is up in {self.workspace.root} ({len(earlier.alive)} processes): "
                    "use it, end it with `collapipe down`, or use another folder with --workspace "
                    "DIR"
                )
            elif earlier.shape != self._record.shape:
                raise WrongStateError(
                    f"a testbed of other clusters is up ({_say_shape(earlier)}, asked for "
                    f"{_say_shape(self._record)}): run `collapipe down` first"
                )
            elif self._emulation is not None and not self.workspace.emulation_file.exists():
                raise WrongStateError(
                    "a testbed is up whose hosts are not in an emulated world: run `collapipe "
                    "down` first"
                )
            else:
                self._record = earlier
                if self._emulation is not None:
                    self._write_emulation()
                return
        self.workspace.emulation_file.unlink(missing_ok=True)
        if self._emulation is not None:
            self._write_emulation()
        self.workspace.write_record(self._record)

    def _write_emulation(self) -> None:
        """Replaces the world atomically: the hosts read it at any time."""
        assert self._emulation is not None
        text = self._emulation.model_dump_json(indent=1, exclude_none=True)
        replace_text(self.workspace.emulation_file, text)

    def _start_together(self, batch: Sequence[Service]) -> None:
        for service in batch:
            self._spawn(service, log_mode="wb")
        self._wait_until_ready(batch)

    def _spawn(self, service: Service, log_mode: str) -> None:
        """Starts a process, at its former address if it had one, and records it."""
        known = self._record.process(service.name)
        scheduler = self._record.process(SCHEDULER)
        is_scheduler = service.name == SCHEDULER
        listen = known.address if known and known.address else LOOPBACK
        if is_scheduler and listen == LOOPBACK:
            listen = self._listen
        check_free(listen, service.name)
        self.workspace.ready_file(service.name).unlink(missing_ok=True)
        emulation_file = self.workspace.emulation_file
        with open(self.workspace.log_file(service.name), log_mode) as log:
            popen = subprocess.Popen(
                command(
                    service,
                    self.workspace,
                    listen=listen,
                    scheduler_address=None if is_scheduler or not scheduler else scheduler.address,
                    emulation_file=emulation_file if emulation_file.exists() else None,
                    exit_with_parent=not self._detached,
                ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal is for the client, which then ends its processes in order.
                start_new_session=True,
                env=child_environment(),
            )
        self._popen[service.name] = popen
        self._write(
            self._record.with_process(
                ProcessRecord(service.name, popen.pid, start_mark(popen.pid) or "")
            )
        )

    def _wait_until_ready(self, batch: Sequence[Service]) -> None:
        waiting = [service.name for service in batch]
        started = reported = time.monotonic()
        while waiting:
            for name in list(waiting):
                popen = self._popen[name]
                address = _ready_address(self.workspace.ready_file(name), popen.pid)
                if address is not None:
                    process = self._known(name)
                    self._write(self._record.with_process(replace(process, address=address)))
                    waiting.remove(name)
                elif popen.poll() is not None:
                    raise PeerLostError(
                        name, f"the testbed did not start: {self.describe_loss(name)}"
                    )
            now = time.monotonic()
            if waiting and now - started > self._start_timeout.total_seconds():
                log = self.workspace.log_file(waiting[0])
                raise PeerLostError(
                    waiting[0],
                    f"the testbed did not start: {', '.join(waiting)} did not serve within "
                    f"{self._start_timeout.total_seconds():g} s; last lines of {log}:\n"
                    f"{last_lines(log)}",
                )
            if waiting and now - reported > _REPORT_SECONDS:
                reported = now
                self._progress(
                    f"waiting for {len(waiting)} of {len(self._services)} processes to serve: "
                    f"{', '.join(waiting)}"
                )
            time.sleep(_POLL_SECONDS if waiting else 0)

    def _is_alive(self, name: str) -> bool:
        popen = self._popen.get(name)
        if popen is not None:
            return popen.poll() is None
        process = self._record.process(name)
        return process is not None and process.alive

    def _known(self, name: str) -> ProcessRecord:
        process = self._record.process(name)
        if process is None:
            names = ", ".join(process.name for process in self._record.processes)
            raise InvalidInputError(
                f"the testbed has no process {name!r}: it has {names or 'none'}"
            )
        return process

    def _write(self, record: WorkspaceRecord) -> None:
        self._record = record
        self.workspace.write_record(record)

    def _end(self, names: Sequence[str]) -> None:
        """Ends processes of this testbed and strikes them off the record."""
        mine = [p for p in self._record.processes if p.name in names]
        end_processes(mine)
        self._reap()
        left = tuple(p for p in self._record.processes if p.name not in names)
        self._record = replace(self._record, processes=left)
        self.workspace.write_record(self._record if left else None)

    def _reap(self) -> None:
        for popen in self._popen.values():
            popen.poll()


def _ready_address(ready_file: Path, pid: int) -> str | None:
    document = read_json(ready_file)
    if document is None or document.get("pid") != pid:
        return None
    return str(document["address"])


def _say_shape(record: WorkspaceRecord) -> str:
    return ", ".join(str(len(cluster)) for cluster in record.shape) + " devices"
