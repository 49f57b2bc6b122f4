"""Finds the scheduler of a command."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from collapipe.errors import InvalidInputError
from collapipe.rpc import Security
from collapipe.v1.scheduler_pb2 import HOST_ROLE_CONTROL_UNIT, HOST_ROLE_DEVICE_AGENT
from collapipe_client.addresses import read_address
from collapipe_client.cli_options import WorkspaceOption
from collapipe_client.client import CollaPipeClient
from collapipe_client.completion import context_names
from collapipe_client.contexts import Context, read_contexts
from collapipe_client.local_testbed import LocalTestbed
from collapipe_client.processes import last_lines
from collapipe_client.reporting import complain
from collapipe_client.testbed_processes import SCHEDULER
from collapipe_client.workspace import DEFAULT_ROOT, Workspace, WorkspaceRecord


@dataclass(frozen=True)
class EndpointOptions:
    """The options that choose a scheduler."""

    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            envvar="COLLAPIPE_SCHEDULER",
            help="Address of the scheduler. Default: that of --context, of `collapipe context use`, or of the local testbed.",
        ),
    ] = None
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            envvar="COLLAPIPE_INSECURE",
            help="Talk to --scheduler without encryption.",
        ),
    ] = False
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="COLLAPIPE_TLS_CA",
            help="Certificate of the root of the authority.",
        ),
    ] = None
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", envvar="COLLAPIPE_TLS_CERT", help="Certificate of this client."
        ),
    ] = None
    tls_key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", envvar="COLLAPIPE_TLS_KEY", help="Private key of this client."
        ),
    ] = None
    context: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            envvar="COLLAPIPE_CONTEXT",
            help="Use the deployment that `collapipe context add` has kept under this name.",
            autocompletion=context_names,
        ),
    ] = ""
    workspace: WorkspaceOption = DEFAULT_ROOT


@dataclass(frozen=True)
class Endpoint:
    """The address of a scheduler, and the security of its connection.

    Args:
        address: "host:port".
        testbed: The local testbed of the scheduler; `None` if the scheduler is not in one.
    """

    address: str
    security: Security
    testbed: WorkspaceRecord | None = None

    def client(self) -> CollaPipeClient:
        """Opens a client."""
        return CollaPipeClient(self.address, self.security)

    def devices(self) -> dict[int, int]:
        """Returns the number of devices of each cluster that is up, by its index."""
        if self.testbed is not None:
            return {index: len(cluster) for index, cluster in enumerate(self.testbed.shape)}
        return {index: len(devices) for index, devices in self.device_memory().items()}

    def device_memory(self) -> dict[int, list[int]]:
        """Returns the memory for training of each device that is up, in bytes, by the index of its cluster. 0 means no limit.

        A cluster without its control unit is left out.
        """
        memory: dict[int, list[int]] = {}
        with self.client() as client:
            hosts = [status.host for status in client.hosts() if status.alive]
        owned = {host.cluster_index for host in hosts if host.role == HOST_ROLE_CONTROL_UNIT}
        for host in hosts:
            if host.role == HOST_ROLE_DEVICE_AGENT and host.cluster_index in owned:
                memory.setdefault(host.cluster_index, []).append(host.memory_bytes)
        return memory


def find_endpoint(options: EndpointOptions) -> Endpoint | None:
    """Returns the scheduler of --scheduler or of a context, else that of the local testbed, else `None`.

    Raises:
        InvalidInputError: The options contradict each other, or the started scheduler has ended.
        NotFoundError: There is no such context.
    """
    if options.scheduler is not None and options.context:
        raise InvalidInputError("--scheduler and --context contradict each other: leave one out")
    named = options if options.scheduler is not None else _named(options.context)
    if isinstance(named, Context) and (lost := named.missing_file()):
        raise InvalidInputError(
            f"{lost} of the context for {named.scheduler} does not exist: join again, or forget the context with `collapipe context "
            "remove NAME`"
        )
    if named is not None:
        assert named.scheduler is not None
        read_address("--scheduler", named.scheduler)
        security = Security.of(named.insecure, named.tls_ca, named.tls_cert, named.tls_key)
        return Endpoint(named.scheduler, security)
    record = running_testbed(options.workspace)
    if record is None:
        return None
    process = record.process(SCHEDULER)
    if process is None or not process.alive:
        log = Workspace(options.workspace).log_file(SCHEDULER)
        raise InvalidInputError(
            f"the scheduler of the testbed in {options.workspace} has ended; last lines of {log}:\n"
            f"{last_lines(log)}\n"
            "Start it again with `collapipe up`, or end the other processes with `collapipe down`"
        )
    certificates = Workspace(options.workspace).certificates
    security = Security.insecure() if record.insecure else certificates.security()
    return Endpoint(process.address, security, record)


def _named(name: str) -> Context | None:
    """Returns a context, by default the one in use; `None` if none is in use."""
    contexts = read_contexts()
    if not name and contexts.used:
        complain(
            f"using the context {contexts.used}; `collapipe context use` goes back to the local testbed"
        )
    name = name or contexts.used
    return contexts.find(name) if name else None


def need_endpoint(options: EndpointOptions) -> Endpoint:
    """Returns the result of `find_endpoint`. Raises `InvalidInputError` if there is no scheduler."""
    endpoint = find_endpoint(options)
    if endpoint is None:
        raise InvalidInputError(
            f"there is no scheduler: no testbed runs in {options.workspace}; give --scheduler HOST:PORT, "
            "or start a testbed with `collapipe up`"
        )
    return endpoint


def running_testbed(workspace: Path) -> WorkspaceRecord | None:
    """Returns the record of the testbed that runs in a workspace, started by `collapipe up` or for a single command."""
    record = Workspace(workspace).read_record()
    if record is None or not record.alive:
        return None
    scheduler = record.process(SCHEDULER)
    # A command that ends takes its testbed with it.
    is_usable = record.detached or (scheduler is not None and scheduler.alive)
    return record if is_usable else None


@contextmanager
def client_for_past_jobs(
    options: EndpointOptions, *, models: bool = False
) -> Iterator[CollaPipeClient]:
    """Opens a client that reads the records of past jobs.

    If no testbed runs, the scheduler of the workspace runs while the client is open.

    Args:
        models: Whether the client also uses the models of jobs. Then the edge server runs, too.
    """
    with _client(options, models=models) as (client, _):
        yield client


@contextmanager
def client_for_model(options: EndpointOptions, job: str) -> Iterator[CollaPipeClient]:
    """Opens a client that uses the model of a job.

    If no testbed runs, the scheduler, the edge server and cluster 0 of the job run while the client is open.
    """
    with _client(options, models=True) as (client, testbed):
        if testbed is not None:
            status = client.find_job(job)
            last = max(0, status.num_rounds_committed - 1)
            stages = client.plans(status.job_id, last)[0].stages
            # Most strategies have the first stage on the control unit, and the last one on the edge server.
            testbed.add_clusters([max(1, len(stages) - 2)])
            testbed.wait_until_registered()
        yield client


@contextmanager
def _client(
    options: EndpointOptions, *, models: bool
) -> Iterator[tuple[CollaPipeClient, LocalTestbed | None]]:
    """Opens a client, and starts a testbed without clusters if none runs."""
    endpoint = find_endpoint(options)
    if endpoint is not None:
        with endpoint.client() as client:
            yield client, None
        return
    if not options.workspace.exists():
        raise InvalidInputError(
            f"there is no testbed in {options.workspace.absolute()}: run this command in the folder where you "
            "trained, or give --workspace DIR or --scheduler HOST:PORT"
        )
    with (
        LocalTestbed(
            [], options.workspace, web="", has_edge_server=models, progress=complain
        ) as testbed,
        testbed.client() as client,
    ):
        testbed.wait_until_registered()
        yield client, testbed
