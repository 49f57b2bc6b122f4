"""Says in words what a job lacks, since when, and how long it tries to go on."""

from datetime import datetime

from google.protobuf.timestamp_pb2 import Timestamp

from collapipe.v1.scheduler_pb2 import (
    HostStatus,
    IncidentCode,
    JobTrouble,
    MissingHost,
    WatchJobResponse,
)
from collapipe_client.message_json import enum_word
from collapipe_client.quantities import say_age


def say_trouble(trouble: JobTrouble, now: float) -> str:
    """Says what a job lacks; "" if nothing. `now` is the Unix time in seconds."""
    parts = []
    if trouble.missing:
        hosts = ", ".join(_say_missing(host, now) for host in trouble.missing)
        parts.append(f"{'waits for' if trouble.waiting else 'goes on without'} {hosts}")
    if failures := trouble.num_failures:
        attempts = "1 attempt has" if failures == 1 else f"{failures} attempts have"
        parts.append(f"{attempts} failed since the last commit")
    if trouble.HasField("gives_up_at"):
        parts.append(f"tries again until {say_moment(trouble.gives_up_at, now)}")
    return "; ".join(parts)


def incident_lines(event: WatchJobResponse) -> list[str]:
    """Returns the code and the text of an incident; nothing for other events."""
    if not event.HasField("incident"):
        return []
    code = enum_word(IncidentCode.Name(event.incident.code), "IncidentCode")
    return [f"{code}: {event.incident.message}"]


def say_last_seen(host: HostStatus | MissingHost, now: float) -> str:
    """Says when the last heartbeat of a host arrived, in words."""
    age = say_age(now - host.last_seen.ToMilliseconds() / 1000)
    return f"last heartbeat {age} ago, at {say_moment(host.last_seen, now)}"


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
