"""Says in words what a job lacks, since when, and how long it tries to go on."""

from collections.abc import Iterable
from datetime import datetime

from google.protobuf.timestamp_pb2 import Timestamp

from collapipe.printable import indented
from collapipe.v1.scheduler_pb2 import (
    HostStatus,
    IncidentCode,
    JobTrouble,
    MissingHost,
    WatchJobResponse,
)
from collapipe_client.message_json import enum_word
from collapipe_client.quantities import say_age

_CLOCK_SECONDS = 30.0
"""A living host has sent a heartbeat in the last 10 s. If that seems to be this much earlier or later, clocks differ."""


def say_trouble(trouble: JobTrouble, now: float, message: str = "") -> str:
    """Says what a job lacks and why attempts failed; "" if nothing.

    Args:
        now: Unix time in seconds.
        message: The message of the job, which is shown, too. A failure that it names is not repeated.
    """
    parts = []
    if trouble.missing:
        hosts = ", ".join(_say_missing(host, now) for host in trouble.missing)
        parts.append(f"{'waits for' if trouble.waiting else 'goes on without'} {hosts}")
    if failures := trouble.num_failures:
        attempts = "1 attempt has" if failures == 1 else f"{failures} attempts have"
        reason = f" ({trouble.failure})" if trouble.failure not in message else ""
        parts.append(f"{attempts} failed since the last commit{reason}")
    if trouble.HasField("gives_up_at"):
        is_away = trouble.waiting and not failures
        unless = "they are not back" if is_away else "no round is committed"
        parts.append(f"ends at {say_moment(trouble.gives_up_at, now)} if {unless} before")
    return "; ".join(parts)


def incident_lines(event: WatchJobResponse) -> list[str]:
    """Returns the code and the text of an incident or a warning, or a note about the data; nothing for other events."""
    if event.HasField("warning"):
        return [indented(f"warning: {event.warning.message}: {event.warning.advice}")]
    if event.HasField("data_note"):
        return [indented(f"{'warning: ' * event.data_note.is_warning}{event.data_note.message}")]
    if not event.HasField("incident"):
        return []
    code = enum_word(IncidentCode.Name(event.incident.code), "IncidentCode")
    return [indented(f"{code}: {event.incident.message}")]


def is_warning(event: WatchJobResponse) -> bool:
    """Returns whether an event is a warning."""
    return event.HasField("warning") or event.data_note.is_warning


def say_last_seen(host: HostStatus | MissingHost, now: float) -> str:
    """Says when the last heartbeat of a host arrived, in words."""
    seconds = now - host.last_seen.ToMilliseconds() / 1000
    moment = say_moment(host.last_seen, now)
    if seconds < -_CLOCK_SECONDS:
        return f"last heartbeat at {moment}, which is in the future: check the clocks of the scheduler and of this machine"
    return f"last heartbeat {say_age(seconds)} ago, at {moment}"


def say_clock(hosts: Iterable[HostStatus], now: float) -> str:
    """Says how far the scheduler's clock is off this one, as the heartbeats of living hosts show; "" if they agree."""
    heard = [host.last_seen.ToMilliseconds() / 1000 for host in hosts if host.alive]
    ahead = max(heard, default=now) - now
    if abs(ahead) < _CLOCK_SECONDS:
        return ""
    return (
        f"the scheduler's clock is about {say_age(round(abs(ahead), -1))} {'ahead of' if ahead > 0 else 'behind'} the clock of this "
        "machine, so times and ages here are wrong by as much: on both machines, run `sudo timedatectl set-ntp true`"
    )


def say_moment(timestamp: Timestamp, now: float) -> str:
    """Writes a time of day in the local time zone, with its date unless that is today's."""
    moment = datetime.fromtimestamp(timestamp.ToMilliseconds() / 1000)
    is_today = moment.date() == datetime.fromtimestamp(now).date()
    return moment.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M:%S")


def _say_missing(host: MissingHost, now: float) -> str:
    if not host.host_id:
        return host.wanted
    if host.left_out:
        return f"{host.host_id} (left out: {host.left_out})"
    if not host.HasField("last_seen"):
        return f"{host.host_id} (not registered since the scheduler started)"
    return f"{host.host_id} ({say_last_seen(host, now)})"
