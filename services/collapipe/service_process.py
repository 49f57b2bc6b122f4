"""The process of a service: its settings, signals, ready file and memory allocator."""

import argparse
import contextlib
import ctypes
import logging
import os
import queue
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from collapipe.certificates import Identity
from collapipe.certificates.identity import IN_A_CLUSTER
from collapipe.documents import hold_directory, no_permission, write_document
from collapipe.errors import CollapipeError, InvalidInputError
from collapipe.metrics_page import serve_metrics
from collapipe.rpc import Security
from collapipe.telemetry.logs import LogFormat, configure_logging

logger = logging.getLogger(__name__)

_PARENT_POLL_SECONDS = 0.5

MOST_OPEN_FILES = 65_536
"""Far more than the connections, the channels and the files of a service need. Some systems allow a thousand million, and
programs that close every possible file before they start another program would then take minutes."""


class ServiceSettings(BaseSettings):
    """Settings of every service. Flags override COLLAPIPE_* in the environment, which override --config."""

    model_config = SettingsConfigDict(
        env_prefix="COLLAPIPE_",
        cli_parse_args=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_exit_on_error=False,
        extra="forbid",
    )

    host_id: str = Field(
        default="",
        description="Name of this host. By default the name in its certificate, or host-ADDRESS without one.",
    )
    listen: str = Field(
        default="127.0.0.1:0",
        description="Where to serve gRPC, host:port; port 0 takes a free port.",
    )
    advertise: str = Field(
        default="",
        description="Where other hosts can reach it, host:port; by default the listen address.",
    )
    metrics_listen: str = Field(
        default="127.0.0.1:0", description="Where to serve /metrics, host:port; empty serves none."
    )
    insecure: bool = Field(default=False, description="Use plain text instead of mutual TLS.")
    tls_ca: Path | None = Field(
        default=None, description="Certificate of the root of the authority, PEM."
    )
    tls_cert: Path | None = Field(default=None, description="Certificate of this process, PEM.")
    tls_key: Path | None = Field(default=None, description="Private key of that certificate, PEM.")
    ready_file: Path | None = Field(
        default=None, description="JSON file that is written as soon as the process serves."
    )
    exit_with_parent: int | None = Field(
        default=None, description="Process id of the parent; the service ends when the parent ends."
    )
    log_format: LogFormat = Field(default="text", description="Format of log lines: text or json.")
    threads: int = Field(
        default=1,
        ge=1,
        description="Threads that compute. Results depend on their number. `collapipe join` sets it to the cores of "
        "the box.",
    )
    config: Path | None = Field(default=None, description="TOML file with any of these settings.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Returns the sources after the command line, which pydantic-settings always reads first."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, _config_file())

    @cached_property
    def security(self) -> Security:
        """How this process and its peers authenticate each other; raises `InvalidInputError`."""
        return Security.of(self.insecure, self.tls_ca, self.tls_cert, self.tls_key)


@dataclass(frozen=True)
class Running:
    """A running service: the address at which it serves gRPC, and a function that ends it in good order."""

    address: str
    drain: Callable[[], None]


S = TypeVar("S", bound=ServiceSettings)


def run_service(service: str, settings_class: type[S], start: Callable[[S, str], Running]) -> None:
    """Runs a service until SIGTERM or SIGINT: the body of every `python -m collapipe.<service>`.

    Args:
        service: The name of its role.
        start: Starts to serve, given the settings and the address of /metrics.
    """
    # A handler that sets an Event could deadlock with the wait that it interrupts. A SimpleQueue cannot.
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    asked_to_end = False

    def on_signal(number: int, frame: Any) -> None:
        nonlocal asked_to_end
        if asked_to_end:  # The second signal ends the process at once.
            os._exit(1)
        asked_to_end = True
        signals.put(number)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    try:
        settings = parse_settings(settings_class)
        presented = settings.security.presented()
        if presented is not None:
            _take_identity(settings, service, presented.identity)
        configure_logging(settings.log_format, service, settings.host_id or service)
        tune_allocator()
        raise_open_files()
        state = hold_directory(getattr(settings, "state_dir", None))
        if settings.exit_with_parent is not None:
            arguments = (settings.exit_with_parent,)
            threading.Thread(target=_exit_with_parent, args=arguments, daemon=True).start()
        metrics_address = serve_metrics(settings.metrics_listen, settings.security)
        running = start(settings, metrics_address)
        if settings.ready_file is not None:
            addresses = {"address": running.address, "metrics_address": metrics_address}
            write_document(settings.ready_file, {**addresses, "pid": os.getpid()})
    except (CollapipeError, OSError) as error:
        said, is_mistake = str(error), isinstance(error, InvalidInputError)
        if isinstance(error, PermissionError) and error.filename:
            said, is_mistake = no_permission(error.filename, error), True
        print(f"{service}: {said}", file=sys.stderr)
        # After status 2, systemd does not restart: a restart would not correct the operator's mistake.
        sys.exit(2 if is_mistake else 1)
    logger.info("serving on %s, metrics on %s", running.address, metrics_address or "no address")
    if presented is None:
        logger.info("plain text: everybody who can reach this service may use it")
    else:
        logger.info("known as %s", presented)
    while not asked_to_end:
        # A signal that arrives just before the wait does not interrupt it, so the wait is short.
        with contextlib.suppress(queue.Empty):
            signals.get(timeout=1.0)
    logger.info("draining")
    running.drain()
    state.close()


def parse_settings(settings_class: type[S]) -> S:
    """Reads settings from the command line, the environment and --config; raises `InvalidInputError`."""
    config = _config_file()
    if config is not None and not os.path.isfile(config):
        raise InvalidInputError(
            f"--config {config}: there is no such file, or this user may not read its folder"
        )
    try:
        return settings_class()
    except ValidationError as error:
        mistakes = [
            f"--{'.'.join(str(part) for part in mistake['loc']).replace('_', '-')}: {mistake['msg']}"
            for mistake in error.errors()
        ]
        raise InvalidInputError(f"{'; '.join(mistakes)} (see --help)") from None
    except SettingsError as error:
        raise InvalidInputError(f"{error} (see --help)") from None
    except ValueError as error:  # The file is not TOML.
        raise InvalidInputError(f"--config {config}: {error}") from None


def _take_identity(settings: ServiceSettings, service: str, identity: Identity) -> None:
    """Gives this process the name and the cluster in its certificate. Peers would refuse every other one."""
    if identity.role.value != service:
        raise InvalidInputError(
            f"--tls-cert {settings.tls_cert} is of {identity}, and this is a {service}: make a certificate with "
            f"`collapipe certs issue DIR {service}:{identity.name}`, or start the service of the certificate"
        )
    if settings.host_id not in ("", identity.name):
        raise InvalidInputError(
            f"--host-id {settings.host_id} is not the name in --tls-cert {settings.tls_cert}, {identity.name}: leave "
            "--host-id out, or make a certificate for that name"
        )
    settings.host_id = identity.name
    if identity.role in IN_A_CLUSTER:
        if "cluster_index" in settings.model_fields_set:
            _check_cluster(settings, identity)
        vars(settings)["cluster_index"] = identity.cluster


def _check_cluster(settings: ServiceSettings, identity: Identity) -> None:
    wanted = vars(settings)["cluster_index"]
    if wanted != identity.cluster:
        raise InvalidInputError(
            f"--cluster-index {wanted} is not the cluster in --tls-cert {settings.tls_cert}, {identity.cluster}: leave "
            f"--cluster-index out, or make a certificate with `collapipe certs issue DIR {identity.role.value}:{identity.name}@{wanted}`"
        )


def _config_file() -> Path | None:
    """Returns the file that --config names, before pydantic-settings parses the command line."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    default = os.environ.get("COLLAPIPE_CONFIG") or None
    parser.add_argument("--config", nargs="?", type=Path, default=default)
    config: Path | None = parser.parse_known_args()[0].config
    return config


def _exit_with_parent(parent: int) -> None:
    """Ends this process when its parent has ended, so that a killed client leaves no services behind."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10 * _PARENT_POLL_SECONDS)
    os._exit(1)


def tune_allocator() -> None:
    """Makes glibc keep freed memory for the next tensor, because new memory from the kernel costs page faults.

    This saves a tenth of the processor time of training, and most of the processor time of large transfers.
    """
    m_trim_threshold, m_top_pad, m_mmap_threshold, m_arena_max = -1, -2, -3, -8
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    if not mallopt(m_mmap_threshold, 1 << 30):
        mallopt(m_mmap_threshold, 32 << 20)  # The largest value that an older glibc accepts.
    mallopt(m_trim_threshold, (1 << 31) - 1)
    mallopt(m_top_pad, 16 << 20)  # These bytes become resident only when they are used.
    # All threads share one arena, so that a thread reuses memory that another thread freed. Separate arenas
    # would hold at most 64 MiB each, and would map larger tensors anew each time. For tensors of 100 MiB, that
    # takes six times the processor time.
    mallopt(m_arena_max, 1)


def raise_open_files() -> None:
    """Raises the limit of open files as far as the system allows. Its default of 1,024 is for programs that use `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # macOS says that there is no limit, and has one.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
