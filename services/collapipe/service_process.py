"""What every service's process does before and after it serves."""

import contextlib
import ctypes
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
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
from collapipe.documents import write_document
from collapipe.errors import CollapipeError, InvalidInputError
from collapipe.rpc import Security
from collapipe.telemetry.exporter import serve_metrics
from collapipe.telemetry.logs import LogFormat, configure_logging

logger = logging.getLogger(__name__)

_PARENT_POLL_SECONDS = 0.5


class ServiceSettings(BaseSettings):
    """Settings of every service: flags of the command line, COLLAPIPE_* in the environment, then --config."""

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
        description="Identity of this process; by default the name in its certificate, or made of its address.",
    )
    listen: str = Field(
        default="127.0.0.1:0", description="Where to serve gRPC; port 0 takes a free one."
    )
    advertise: str = Field(
        default="", description="Where others reach it; by default the listen address."
    )
    metrics_listen: str = Field(
        default="127.0.0.1:0", description="Where to serve /metrics; empty for nowhere."
    )
    insecure: bool = Field(default=False, description="Speak plain text.")
    tls_ca: Path | None = Field(default=None, description="Certificate of the authority, PEM.")
    tls_cert: Path | None = Field(default=None, description="Certificate of this process, PEM.")
    tls_key: Path | None = Field(default=None, description="Key of the certificate, PEM.")
    ready_file: Path | None = Field(
        default=None, description="Written as JSON as soon as the process serves."
    )
    exit_with_parent: int | None = Field(
        default=None, description="End when this process, which started it, ends."
    )
    log_format: LogFormat = Field(default="text", description="text or json.")
    threads: int = Field(
        default=1, ge=1, description="Threads that compute; results depend on their number."
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
        """Environment before file; the command line comes before both by itself."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, _config_file())

    @property
    def security(self) -> Security:
        """How this process and its peers know each other; raises `InvalidInputError`."""
        return Security.of(self.insecure, self.tls_ca, self.tls_cert, self.tls_key)


@dataclass(frozen=True)
class Running:
    """A service that serves."""

    address: str
    """Where it serves gRPC."""
    drain: Callable[[], None]
    """Ends it in good order."""


S = TypeVar("S", bound=ServiceSettings)


def run_service(service: str, settings_class: type[S], start: Callable[[S, str], Running]) -> None:
    """Runs a service until it is asked to end; the body of every `python -m collapipe.<service>`.

    Args:
        service: Its name, for logs.
        settings_class: Its settings.
        start: Starts serving; is given the settings and where /metrics is served.
    """
    # a queue: a handler that sets an Event may deadlock with the wait that it interrupts
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    asked = False

    def on_signal(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:  # asked twice: no patience
            os._exit(1)
        asked = True
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
        if settings.exit_with_parent is not None:
            parent = settings.exit_with_parent
            threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
        metrics_address = serve_metrics(settings.metrics_listen)
        running = start(settings, metrics_address)
    except CollapipeError as error:
        print(f"{service}: {error}", file=sys.stderr)
        # 2 is for good: whoever restarts services need not try again
        sys.exit(2 if isinstance(error, InvalidInputError) else 1)
    if settings.ready_file is not None:
        write_document(
            settings.ready_file,
            {"address": running.address, "metrics_address": metrics_address, "pid": os.getpid()},
        )
    logger.info("serving on %s, metrics on %s", running.address, metrics_address or "no address")
    if presented is None:
        logger.info("plain text: whoever reaches this service can use it")
    else:
        logger.info(
            "known as %s until %s", presented.identity, f"{presented.expires:%Y-%m-%d %H:%M} UTC"
        )
    while not asked:
        # a signal in the moment before a wait does not interrupt it: look again every second
        with contextlib.suppress(queue.Empty):
            signals.get(timeout=1.0)
    logger.info("draining")
    running.drain()


def parse_settings(settings_class: type[S]) -> S:
    """Reads settings from the command line, the environment and --config; raises `InvalidInputError`."""
    config = _config_file()
    if config is not None and not os.path.isfile(config):
        raise InvalidInputError(
            f"--config {config}: there is no such file, or this user may not look for it"
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
    except ValueError as error:  # of the file, which is not TOML
        raise InvalidInputError(f"--config {config}: {error}") from None


def _take_identity(settings: ServiceSettings, service: str, identity: Identity) -> None:
    """Makes this process who its certificate says: peers would refuse it under any other name."""
    if identity.role.value != service:
        raise InvalidInputError(
            f"--tls-cert {settings.tls_cert} is of {identity}, and this is a {service}: make a certificate with "
            f"`collapipe certs issue DIR {service}:{identity.name}`, or start what it is for"
        )
    if settings.host_id not in ("", identity.name):
        raise InvalidInputError(
            f"--host-id {settings.host_id} is not the name in --tls-cert {settings.tls_cert}, {identity.name}: leave "
            "it out, or make a certificate for it"
        )
    settings.host_id = identity.name


def _config_file() -> Path | None:
    """The file that --config names: needed before the settings are parsed."""
    for position, argument in enumerate(sys.argv):
        if argument == "--config" and position + 1 < len(sys.argv):
            return Path(sys.argv[position + 1])
        if argument.startswith("--config="):
            return Path(argument.partition("=")[2])
    named = os.environ.get("COLLAPIPE_CONFIG")
    return Path(named) if named else None


def _exit_with_parent(parent: int) -> None:
    """Ends this process when its parent is gone: a client that was killed leaves no services behind."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10 * _PARENT_POLL_SECONDS)
    os._exit(1)


def tune_allocator() -> None:
    """Keeps freed memory for the next tensor instead of returning it to the kernel, page fault by page fault.

    Saves a tenth of the processor time of training, and most of that of large transfers. Only glibc has it.
    """
    m_trim_threshold, m_top_pad, m_mmap_threshold, m_arena_max = -1, -2, -3, -8
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    if not mallopt(m_mmap_threshold, 1 << 30):
        mallopt(m_mmap_threshold, 32 << 20)  # the most that an older glibc takes
    mallopt(m_trim_threshold, (1 << 31) - 1)
    mallopt(m_top_pad, 16 << 20)  # not resident until it is used
    # the arenas of other threads hold at most 64 MiB and map what is larger anew each time: six times the processor
    # time for tensors of 100 MiB. In one arena a thread also reuses what another freed
    mallopt(m_arena_max, 1)
