"""Provides a Docker Engine for tests: the running one, or a private one that leaves nothing behind."""

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from containers.engine_network import kept_network

START_SECONDS = 60.0
STOP_SECONDS = 60.0
# These addresses differ from Docker's own 172.17.0.0/16 and from those that homes and offices use.
_BRIDGE = "collapipe0"
_BRIDGE_ADDRESS = "10.212.0.1/24"
_ADDRESS_POOL = "base=10.213.0.0/16,size=24"
_NEEDS = "apt-get install docker.io docker-compose iptables iproute2 debootstrap ca-certificates"


class NoEngineError(Exception):
    """No engine runs, and none can be started. The message says why."""


class CommandError(AssertionError):
    """A command failed."""


@dataclass(frozen=True)
class Engine:
    """A running engine, and the commands that control it.

    Args:
        docker: Path of a `docker` command that can build with BuildKit.
        compose: The command line of docker-compose.
        environment: Environment variables of both commands.
        restart: Restarts the engine; `None` if it is not one of the tests.
    """

    docker: str
    compose: Sequence[str]
    environment: Mapping[str, str]
    restart: Callable[[], None] | None = None

    def run(
        self,
        *arguments: str,
        check: bool = True,
        timeout: float = 120.0,
        stdin: str | None = None,
    ) -> str:
        """Runs `docker` and returns its output without the last line end.

        Raises:
            CommandError: The command failed.
        """
        command = [self.docker, *arguments]
        return run(command, self.environment, check=check, timeout=timeout, stdin=stdin)

    @property
    def gateway(self) -> str:
        """The address at which containers and builds on the default bridge reach this machine."""
        return self.run(
            "network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Gateway}}"
        )

    def has_image(self, tag: str) -> bool:
        """Returns whether the engine has the image."""
        return bool(self.run("image", "ls", "--quiet", tag))

    def leftovers(self) -> dict[str, list[str]]:
        """Returns the names of all containers, volumes, and networks that an empty engine does not have."""
        networks = self.run("network", "ls", "--format", "{{.Name}}").splitlines()
        return {
            "containers": self.run("ps", "--all", "--format", "{{.Names}}").splitlines(),
            "networks": [name for name in networks if name not in ("bridge", "host", "none")],
            "volumes": self.run("volume", "ls", "--quiet").splitlines(),
        }


def run(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    check: bool = True,
    timeout: float = 120.0,
    stdin: str | None = None,
    cwd: Path | None = None,
) -> str:
    """Runs a command and returns its standard output.

    Raises:
        CommandError: The command failed or did not end in time. The message has the end of its output.
    """
    try:
        done = subprocess.run(
            command,
            env=environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=cwd,
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace")[-3000:] if error.stdout else ""
        raise CommandError(f"{' '.join(command)}: not done in {timeout:g} s\n{output}") from None
    if check and done.returncode:
        raise CommandError(
            f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        )
    return done.stdout.rstrip("\n")


def cache_directory() -> Path:
    """Returns the folder that keeps base images and the private engine's layers between runs.

    The variable COLLAPIPE_CI_CACHE names it. The default is in ~/.cache.
    """
    named = os.environ.get("COLLAPIPE_CI_CACHE")
    directory = Path(named) if named else Path.home() / ".cache" / "collapipe-ci"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@contextmanager
def docker_engine() -> Iterator[Engine]:
    """Yields the running engine, or a private engine that ends with the context.

    Raises:
        NoEngineError: No engine runs, and none can be started. The message says why.
    """
    with suppress(NoEngineError, CommandError):
        engine = _clients(dict(os.environ))
        engine.run("version", timeout=20)
        yield engine
        return
    if os.geteuid() != 0:
        raise NoEngineError("no Docker Engine runs here, and only root can start one")
    with private_engine(cache_directory() / "docker") as engine:
        yield engine


@contextmanager
def private_engine(directory: Path) -> Iterator[Engine]:
    """Starts a private engine. In the end, stops it and restores the network settings of this machine.

    Args:
        directory: Folder for images, on a file system that overlay2 can use. Containers, networks and volumes
            are removed in the end.

    Raises:
        NoEngineError: A needed command is missing, or another process uses the directory.
    """
    missing = [name for name in ("dockerd", "iptables", "ip") if shutil.which(name) is None]
    if missing:
        raise NoEngineError(f"this machine has no {', '.join(missing)}: {_NEEDS}")
    # The path of a socket must be short, so the socket is not in the cache folder.
    work = Path(tempfile.mkdtemp(prefix="collapipe-docker-"))
    engine = _clients({**os.environ, "DOCKER_HOST": f"unix://{work}/docker.sock"})
    try:
        with _sole_user(directory), kept_network(_BRIDGE, _BRIDGE_ADDRESS):
            daemon = _Daemon(directory / "data", work, engine)
            try:
                _empty(engine)
                yield replace(engine, restart=daemon.restart)
                _empty(engine)
            finally:
                daemon.stop()
        left = [pid for pid, line in _command_lines().items() if str(work) in line]
        assert not left, f"processes of the engine outlive it: {left}"
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _clients(environment: dict[str, str]) -> Engine:
    """Finds docker-compose, and a docker command that builds with BuildKit.

    The first docker on PATH may lack buildx, so later ones are tried, too.
    """
    environment = {**environment, "DOCKER_BUILDKIT": "1", "COMPOSE_DOCKER_CLI_BUILD": "1"}
    folders = environment.get("PATH", os.defpath).split(os.pathsep)
    candidates = [path for folder in folders if (path := shutil.which("docker", path=folder))]
    for docker in candidates:
        answer = subprocess.run(
            [docker, "build", "--help"], env=environment, capture_output=True, text=True
        )
        if answer.returncode == 0 and "missing or broken" not in answer.stdout + answer.stderr:
            break
    else:
        raise NoEngineError(
            f"no docker here builds with BuildKit ({', '.join(candidates) or 'none at all'}): {_NEEDS}"
        )
    # docker-compose runs the first docker on PATH, so put the chosen one there.
    environment["PATH"] = os.pathsep.join([str(Path(docker).parent), *folders])
    standalone = shutil.which("docker-compose")
    compose = [standalone] if standalone else [docker, "compose"]
    if subprocess.run([*compose, "version"], capture_output=True).returncode:
        raise NoEngineError(f"this machine has no docker-compose: {_NEEDS}")
    return Engine(docker, compose, environment)


@contextmanager
def _sole_user(directory: Path) -> Iterator[None]:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NoEngineError(
                f"another process runs an engine in {directory}: wait for it, or set COLLAPIPE_CI_CACHE to "
                "another folder"
            ) from None
        yield


class _Daemon:
    """The process of a private engine. The constructor starts it."""

    def __init__(self, data: Path, work: Path, engine: Engine) -> None:
        self._data, self._work, self._engine = data, work, engine
        for pid, line in _command_lines().items():
            # This process holds the lock on the directory, so a daemon that uses it remains from a killed run.
            if line.startswith("dockerd") and str(data) in line:
                _stop(pid)
        self._start()

    def restart(self) -> None:
        """Stops it and starts it again, as a reboot of the machine does."""
        self.stop()
        self._start()

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        log = self._work / "dockerd.log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    "dockerd",
                    *("--data-root", str(self._data), "--exec-root", str(self._work / "exec")),
                    *("--pidfile", str(self._work / "pid")),
                    *("--host", f"unix://{self._work}/docker.sock"),
                    *("--bridge", _BRIDGE, "--default-address-pool", _ADDRESS_POOL),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must end the tests, which then stop the daemon
            )
        deadline = time.monotonic() + START_SECONDS
        while True:
            with suppress(CommandError):
                self._engine.run("version", timeout=10)
                break
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = log.read_text(errors="replace")[-2000:]
                self.stop()
                raise NoEngineError(f"dockerd does not start here:\n{tail}")
            time.sleep(0.1)


def _empty(engine: Engine) -> None:
    """Removes all containers, networks and volumes, which may remain from a killed run."""
    containers = engine.run("ps", "--all", "--quiet").split()
    if containers:
        engine.run("rm", "--force", "--volumes", *containers)
    engine.run("network", "prune", "--force")
    volumes = engine.run("volume", "ls", "--quiet").split()
    if volumes:
        engine.run("volume", "rm", "--force", *volumes)


def _stop(pid: int) -> None:
    deadline = time.monotonic() + STOP_SECONDS
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)


def _command_lines() -> dict[int, str]:
    """Returns the command lines of this machine's processes by pid."""
    lines = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            lines[int(path.parent.name)] = path.read_bytes().replace(b"\0", b" ").decode()
    return lines
