"""Runs a whole CollaPipe on this machine: every service is a process, and all traffic stays on loopback.

The scheduler starts first, because all other services need its address. Meanwhile, one process imports torch, and then
forks all others. Each process is recorded in the workspace as soon as it is started. So a later command can end it even if
this command is killed.
"""

import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import HTTPSHandler, ProxyHandler, build_opener

from typing_extensions import Self

from collapipe.certificates import Identity
from collapipe.certificates.identity import OF_THIS_MACHINE
from collapipe.documents import read_document
from collapipe.emulation.emulation_file import Emulation
from collapipe.errors import CollapipeError, PeerLostError, WrongStateError
from collapipe.rpc import Security
from collapipe_client.addresses import read_address
from collapipe_client.client import CollaPipeClient
from collapipe_client.forking import ForkedProcess, ForkServer
from collapipe_client.processes import (
    GRACE,
    ProcessRecord,
    check_free,
    child_environment,
    describe_exit,
    end_processes,
    last_lines,
    start_seconds,
)
from collapipe_client.supervisor import Supervisor
from collapipe_client.testbed_certificates import PROMETHEUS, USER
from collapipe_client.testbed_processes import (
    EDGE_SERVER,
    LOOPBACK,
    SCHEDULER,
    Clusters,
    Service,
    command,
    expand_clusters,
    services,
)
from collapipe_client.workspace import DEFAULT_ROOT, Workspace, WorkspaceRecord, replace_text

_POLL_SECONDS = 0.05
_REPORT_SECONDS = 2.0

_LIFETIME = timedelta(days=1)
_DETACHED_LIFETIME = timedelta(days=30)
"""Nothing but the next `collapipe up` renews the certificates of a detached testbed."""
_RENEWAL_SECONDS = 30.0
"""Short, because a certificate may expire while the machine sleeps."""
_METRICS_SECONDS = 10.0
_EVERY_ADDRESS = ("0.0.0.0", "::")
_FEWEST_FORKS = 3
"""Fewer hosts are started one by one: importing the code of all hosts takes longer than importing that of a host."""


class LocalTestbed:
    """One scheduler, one edge server, and for each cluster a control unit and its devices.

    Ten lines train a model:

        from pathlib import Path
        from collapipe_client import LocalTestbed, load_preset

        job = load_preset("demo")
        with LocalTestbed(clusters=[3, 3]) as testbed:
            client = testbed.client()
            job_id = client.submit(job)
            for line in client.lines(job_id):
                print(line)
            client.export(job_id, Path("model"))

    Args:
        clusters: For each cluster: the number of its devices, or the devices.
        workspace: Folder for state, logs and records. The state stays when the testbed ends, so that the next
            testbed can resume a job.
        emulation: What the hosts pretend to be, by names such as `device-0-1`, `control-unit-0` and
            `edge-server`. `None` for no emulation.
        scheduler_options: Further flags of the scheduler, for example the URL of Prometheus.
        detached: Whether the processes outlive this one. Then `LocalTestbed.end` ends them.
        supervised: Restart processes that end although nobody stopped them. A detached testbed ignores it.
        insecure: Use plain text instead of mutual TLS, to measure what that costs. Then every user of this machine can use the
            testbed.
        listen: Address of the scheduler, "host:port".
        web: Address of the page in the browser, "host:port"; empty for no page. Its link is that of `Workspace.page_link`.
        has_edge_server: Whether an edge server starts. Without one, the scheduler tells of past jobs, but their models cannot be
            used.
        progress: Receives messages about long waits and about problems that were solved.
        serving: Receives how many processes serve, and how many there are, while they start. Without it, `progress` is told.
    """

    forks_hosts = True
    """Whether hosts that start together are forks of one process."""

    def __init__(
        self,
        clusters: Clusters,
        workspace: Path = DEFAULT_ROOT,
        *,
        emulation: Emulation | None = None,
        scheduler_options: Sequence[str] = (),
        detached: bool = False,
        supervised: bool = False,
        insecure: bool = False,
        listen: str = LOOPBACK,
        web: str = LOOPBACK,
        has_edge_server: bool = True,
        start_timeout: timedelta = timedelta(seconds=180),
        progress: Callable[[str], None] | None = None,
        serving: Callable[[int, int], None] | None = None,
    ) -> None:
        self.workspace = Workspace(workspace)
        devices = expand_clusters(clusters)
        listed = services(devices, scheduler_options)
        self._services = {s.name: s for s in listed if has_edge_server or s.name != EDGE_SERVER}
        self.emulation = emulation
        """What the hosts emulate; `emulate` changes it. `None` for nothing."""
        self._detached = detached
        self.supervised = supervised
        self._insecure = insecure
        self._listen = listen
        self._web = web
        self._start_seconds = start_timeout.total_seconds()
        self._progress = progress or (lambda message: None)
        self._serving = serving
        self._stopping = threading.Event()
        self._popen: dict[str, subprocess.Popen[bytes] | ForkedProcess] = {}
        self._fork_server: ForkServer | None = None
        self._owned = ExitStack()
        shape = [[(d.memory_bytes, d.speed) for d in cluster] for cluster in devices]
        self._record = WorkspaceRecord(detached, shape, insecure=insecure)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def scheduler_address(self) -> str:
        """The gRPC address of the scheduler, "host:port"."""
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
        return CollaPipeClient(self.scheduler_address, self.security())

    def security(self, name: str = USER.name) -> Security:
        """Returns how the user, or a process, authenticates itself to the other processes."""
        return Security.insecure() if self._insecure else self.workspace.certificates.security(name)

    @property
    def endpoint_options(self) -> list[str]:
        """The flags with which a command of the client uses this testbed."""
        return ["--scheduler", self.scheduler_address, *self._security_options(USER.name)]

    def metrics(self, name: str) -> str:
        """Returns the page of metrics of a process. Raises `WrongStateError` if it cannot be read."""
        ready = read_document(self.workspace.ready_file(name)) or {}
        context = self.security(PROMETHEUS.name).client_context()
        url = f"http{'s' if context else ''}://{ready.get('metrics_address')}/metrics"
        # No proxy of this machine leads to its own loopback.
        handlers = ProxyHandler({}), HTTPSHandler(context=context)
        try:
            with build_opener(*handlers).open(url, timeout=_METRICS_SECONDS) as answer:
                return str(answer.read(), "utf-8")
        except (OSError, ValueError) as error:
            raise WrongStateError(
                f"the metrics of {name} at {url} cannot be read ({error}): see {self.workspace.log_file(name)}"
            ) from None

    def emulate(self, emulation: Emulation) -> None:
        """Changes what the hosts emulate. They apply the change before their next micro-batch.

        A device that was not emulated before keeps the memory and the power that it registered.

        Raises:
            WrongStateError: The hosts were started without an emulation.
        """
        if not self.workspace.emulation_file.exists():
            raise WrongStateError(
                "the testbed was started without an emulation: start it with "
                "LocalTestbed(..., emulation=Emulation())"
            )
        self.emulation = emulation
        self._write_emulation()

    def start(self) -> None:
        """Starts the processes and waits until all serve.

        If a detached testbed is running already, only the processes that have ended are started.

        Raises:
            PeerLostError: A process ended while it started, or did not serve in time. Then all processes
                that were started here are ended again.
            WrongStateError: The workspace is in use.
        """
        with ExitStack() as owned:
            owned.enter_context(self.workspace.locked())
            self._take_over()
            before = self._record
            missing = [name for name in self._services if not self._is_alive(name)]
            owned.callback(self._close_fork_server)
            self._open_fork_server(missing)
            self._issue_certificates()
            try:
                self._start_together([name for name in missing if name == SCHEDULER])
                self._start_together([name for name in missing if name != SCHEDULER])
            except BaseException:
                self._end(missing)
                if before.processes:
                    # Processes that still run call the ended ones at their recorded addresses.
                    self._record = before
                    self.workspace.write_record(before)
                raise
            if not self._detached:
                owned.callback(lambda: self._end(list(self._services)))
                self._stopping.clear()
                threading.Thread(target=self._renew_until_stopped, daemon=True).start()
                if self.supervised:
                    owned.enter_context(Supervisor(self.lost, self._restart, self._progress))
                owned.callback(self._stopping.set)
                self._owned = owned.pop_all()

    def add_clusters(self, clusters: Clusters) -> None:
        """Starts clusters in a testbed that has none yet, and waits until all of their processes serve.

        Raises:
            PeerLostError: A process ended while it started, or did not serve in time.
        """
        devices = expand_clusters(clusters)
        added = {s.name: s for s in services(devices) if s.name not in self._services}
        self._services = self._services | added  # another thread may read it
        self._open_fork_server(list(added))
        self._issue_certificates()
        shape = [[(d.memory_bytes, d.speed) for d in cluster] for cluster in devices]
        self._record = replace(self._record, shape=shape)
        self._start_together(list(added))  # `start` has locked the workspace until `stop`.

    def wait_until_registered(self) -> None:
        """Waits until the scheduler knows every host, which is shortly after they serve.

        Raises:
            PeerLostError: A host did not register in time.
        """
        expected = self._services.keys() - {SCHEDULER}
        deadline = time.monotonic() + self._start_seconds
        with self.client() as client:
            while missing := expected - {s.host.host_id for s in client.hosts() if s.alive}:
                if time.monotonic() > deadline:
                    raise PeerLostError(
                        min(missing),
                        f"{', '.join(sorted(missing))} did not register with the scheduler within "
                        f"{self._start_seconds:g} s: see {self.workspace.logs}",
                    )
                time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """Ends the processes, unless the testbed is detached: SIGTERM, a bounded wait, SIGKILL."""
        self._owned.close()

    def lost(self) -> list[str]:
        """Names the processes that have ended since they were started."""
        return [p.name for p in self._record.processes if not self._is_alive(p.name)]

    def describe_loss(self, name: str) -> str:
        """Says how a process ended, with the last lines of its log."""
        log = self.workspace.log_file(name)
        return f"{name} {self._say_exit(name)}; last lines of {log}:\n{last_lines(log)}"

    def _restart(self, name: str) -> None:
        """Restarts a process that has ended."""
        self._progress(f"{name} {self._say_exit(name)}, so it is started again")
        self._start_together([name])

    def _say_exit(self, name: str) -> str:
        popen = self._popen.get(name)
        return describe_exit(popen.poll() if popen else None)

    @staticmethod
    def end(workspace: Path = DEFAULT_ROOT, grace: timedelta = GRACE) -> WorkspaceRecord | None:
        """Ends the detached testbed of a workspace, and returns its record; `None` if there was none."""
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
        """Continues a detached testbed that is running, or ends the processes of a killed command."""
        earlier = self.workspace.read_record()
        if earlier is not None and earlier.alive:
            if earlier.detached:
                self._adopt(earlier)
                return
            self._progress(f"ending {len(earlier.alive)} processes of a command that was killed")
            end_processes(earlier.alive)
        self.workspace.emulation_file.unlink(missing_ok=True)
        self._write_emulation()
        self.workspace.write_record(self._record)

    def _adopt(self, running: WorkspaceRecord) -> None:
        """Continues a detached testbed. Raises `WrongStateError` if it differs from this one."""
        if not self._detached:
            raise WrongStateError(
                f"a testbed is running in {self.workspace.root} ({len(running.alive)} processes): use it, end it "
                "with `collapipe down`, or use another folder with --workspace DIR"
            )
        if running.insecure != self._record.insecure:
            raise WrongStateError(
                "the testbed that is running speaks plain text, or this one would, for example because an older version started it: "
                "run `collapipe down` first"
            )
        if not self._insecure and self.workspace.certificates.is_old:
            raise WrongStateError(
                "an older version of CollaPipe started the testbed that is running, and its certificates are of another kind: run "
                "`collapipe down` first"
            )
        if running.shape != self._record.shape:
            raise WrongStateError(
                f"a testbed with other clusters is running ({_say_shape(running)} instead of "
                f"{_say_shape(self._record)}): run `collapipe down` first"
            )
        if self.emulation is not None and not self.workspace.emulation_file.exists():
            raise WrongStateError(
                "a testbed is running whose hosts were started without an emulation: run `collapipe down` first"
            )
        self._record = running
        self._write_emulation()

    def _write_emulation(self) -> None:
        if self.emulation is not None:
            text = self.emulation.model_dump_json(indent=1, exclude_none=True)
            replace_text(self.workspace.emulation_file, text)

    def _security_options(self, name: str) -> list[str]:
        return ["--insecure"] if self._insecure else self.workspace.certificates.options(name)

    def _issue_certificates(self) -> None:
        """Makes certificates, and renews those that are due. Processes that run take the new ones without a restart."""
        holders: dict[Identity, set[str]] = {USER: set(), PROMETHEUS: set()}
        for name, service in self._services.items():
            host, _ = read_address(f"the address of {name},", self._address_of(name), least_port=0)
            holders[service.identity] = {host} - {*OF_THIS_MACHINE, *_EVERY_ADDRESS}
        lifetime = _DETACHED_LIFETIME if self._detached else _LIFETIME
        self.workspace.certificates.issue(holders, lifetime)

    def _renew_until_stopped(self) -> None:
        told = ""
        while not self._stopping.wait(_RENEWAL_SECONDS):
            try:
                self._issue_certificates()
                told = ""
            except CollapipeError as error:
                if str(error) != told:
                    self._progress(f"the certificates of the testbed are not renewed: {error}")
                told = str(error)

    def _open_fork_server(self, names: Sequence[str]) -> None:
        if self.forks_hosts and len({*names} - {SCHEDULER}) >= _FEWEST_FORKS:
            self._close_fork_server()
            log = self.workspace.log_file("fork-server")
            self._fork_server = ForkServer(log, self._start_seconds)

    def _close_fork_server(self) -> None:
        if self._fork_server is not None:
            self._fork_server.close()

    def _start_together(self, names: Sequence[str]) -> None:
        for name in names:
            self._spawn(self._services[name])
        self._wait_until_ready(names)

    def _spawn(self, service: Service) -> None:
        """Starts a process and records it. A process that ran before gets its former address."""
        known = self._record.process(service.name)
        is_scheduler = service.name == SCHEDULER
        # Jobs of an earlier testbed go on only if somebody resumes them.
        if is_scheduler and known is None:
            service = replace(service, options=(*service.options, "--abandon-jobs"))
        if is_scheduler:
            # A scheduler that is started again serves the page where it did, so that open pages go on.
            page = urlsplit(self.workspace.page_link()).netloc if known else ""
            options = ("--web", page or self._web) if self._web else ()
            service = replace(service, options=(*service.options, *options))
        listen = self._address_of(service.name)
        self.workspace.ready_file(service.name).unlink(missing_ok=True)
        emulation_file = self.workspace.emulation_file
        server = None if is_scheduler else self._fork_server
        if server is not None and not server.is_alive:
            server = None
        line = command(
            service,
            self.workspace,
            self._security_options(service.name),
            listen=listen,
            scheduler_address=None if is_scheduler else self.scheduler_address,
            emulation_file=emulation_file if emulation_file.exists() else None,
            parent=None if self._detached else server.pid if server else os.getpid(),
        )
        line = self._command_line(service.name, listen, line)
        log_file = self.workspace.log_file(service.name)
        # The log of a process that is started again still says why it has ended.
        append = known is not None
        popen: subprocess.Popen[bytes] | ForkedProcess
        if server is not None:
            module, *arguments = line[line.index("-m") + 1 :]
            popen = server.fork(module, arguments, log_file, append=append)
        else:
            with open(log_file, "ab" if append else "wb") as log:
                popen = subprocess.Popen(
                    line,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # Ctrl-C in the terminal reaches only this process, which then ends the others in order.
                    start_new_session=True,
                    env=child_environment(),
                )
        self._popen[service.name] = popen
        self._write(ProcessRecord(service.name, popen.pid, start_seconds(popen.pid)))

    def _address_of(self, name: str) -> str:
        """Returns where a process listens, "host:port". One that ran before listens where it did."""
        known = self._record.process(name)
        return (known.address if known else "") or self._listen_address(name)

    def _listen_address(self, name: str) -> str:
        """Returns where a process listens that has no address yet, "host:port"."""
        host = self._listen.rpartition(":")[0]
        if name == SCHEDULER:
            return self._listen
        # The scheduler refuses loopback addresses from hosts that call it over a network address.
        return LOOPBACK if host.strip("[]") in _EVERY_ADDRESS else f"{host}:0"

    def _command_line(self, name: str, listen: str, line: list[str]) -> list[str]:
        """Returns the command line to execute; a subclass may wrap `line`. Raises `InvalidInputError` if the port is taken."""
        check_free(listen, name)
        return line

    def _wait_until_ready(self, names: Sequence[str]) -> None:
        waiting, told = list(names), 0
        started = reported = time.monotonic()
        while True:
            for name in list(waiting):
                popen = self._popen[name]
                address = _ready_address(self.workspace.ready_file(name), popen.pid)
                if address is not None:
                    pid = popen.pid
                    self._write(ProcessRecord(name, pid, start_seconds(pid), address))
                    waiting.remove(name)
                elif not self._is_alive(name):
                    raise PeerLostError(
                        name, f"the testbed did not start: {self.describe_loss(name)}"
                    )
            if self._serving is not None:
                serve = [p for p in self._record.processes if p.address and p.name not in waiting]
                self._serving(len(serve), len(self._services))
            if not waiting or self._stopping.is_set():
                return
            now = time.monotonic()
            if now - started > self._start_seconds:
                log = self.workspace.log_file(waiting[0])
                raise PeerLostError(
                    waiting[0],
                    f"the testbed did not start: {', '.join(waiting)} did not serve within "
                    f"{self._start_seconds:g} s; last lines of {log}:\n{last_lines(log)}",
                )
            if self._serving is None and now - reported > _REPORT_SECONDS and len(waiting) != told:
                reported, told = now, len(waiting)
                self._progress(
                    f"waiting for {len(waiting)} of {len(self._services)} processes to serve: "
                    f"{', '.join(waiting)}"
                )
            time.sleep(_POLL_SECONDS)

    def _is_alive(self, name: str) -> bool:
        popen = self._popen.get(name)
        if popen is not None and popen.poll() is not None:
            return False
        process = self._record.process(name)
        return process is not None and process.alive

    def _write(self, process: ProcessRecord) -> None:
        self._record = self._record.with_process(process)
        self.workspace.write_record(self._record)

    def _end(self, names: Sequence[str]) -> None:
        """Ends processes of this testbed and removes them from the record."""
        end_processes([p for p in self._record.processes if p.name in names])
        self._reap()
        remaining = tuple(p for p in self._record.processes if p.name not in names)
        self._record = replace(self._record, processes=remaining)
        self.workspace.write_record(self._record if remaining else None)

    def _reap(self) -> None:
        """Collects the exit codes of ended processes, so that they do not stay as zombies."""
        for popen in self._popen.values():
            popen.poll()


def _ready_address(ready_file: Path, pid: int) -> str | None:
    document = read_document(ready_file)
    if document is None or document.get("pid") != pid:
        return None
    return str(document["address"])


def _say_shape(record: WorkspaceRecord) -> str:
    return ", ".join(str(len(cluster)) for cluster in record.shape) + " devices"
