"""Finds out which hosts a job lacks, and tells when one of them is lost or back."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from collapipe.scheduler.host_choice import Gap
from collapipe.scheduler.host_registry import HostRegistry
from collapipe.v1 import scheduler_pb2

_LOST = scheduler_pb2.INCIDENT_CODE_HOST_LOST
_LEFT_OUT = scheduler_pb2.INCIDENT_CODE_HOST_LEFT_OUT
_BACK = scheduler_pb2.INCIDENT_CODE_HOST_BACK

_TOLD_EACH = 10
"""Most hosts with the same change of which each is told by itself. If the scheduler was busy, it may miss all of 1,000 hosts,
and so many events for each client would keep it busy."""


class MissingHosts:
    """The hosts that one job lacks.

    Args:
        tell: Called with a code, a text and a host id, once for each change. With many hosts, once for all of their ids.
    """

    def __init__(self, registry: HostRegistry, tell: Callable[..., None]) -> None:
        self._registry = registry
        self._tell = tell
        self._told: dict[str, scheduler_pb2.IncidentCode] = {}
        """What was told last about each host that is missing."""

    def look(
        self, used: Iterable[str], lacking: Sequence[str | Gap], left_out: Mapping[str, str]
    ) -> list[scheduler_pb2.MissingHost]:
        """Returns the hosts that are missing now, and tells what has changed since the last look.

        Args:
            used: Ids of the hosts that the job has used.
            lacking: Ids and kinds of hosts with which the job would run, if they were there.
            left_out: Ids of hosts that the job leaves out, and why. An empty text stands for suspicion by others.
        """
        used = set(used)
        alive = {host.host_id for host in self._registry.alive()}
        if not lacking and not self._told and used <= alive:
            return []  # This is the rule, and describing 1,000 hosts takes long.
        statuses = {
            status.host.host_id: status
            for status in (*self._registry.statuses(), *self._registry.refused())
        }
        lost = {host_id for host_id, status in statuses.items() if not status.alive}
        wanted = {host_id: "" for host_id in lost.intersection(used)}
        missing = []
        for lack in lacking:
            if isinstance(lack, Gap):
                fitting = [
                    host_id
                    for host_id, status in statuses.items()
                    if (status.host.role, status.host.cluster_index)
                    == (lack.role, lack.cluster_index)
                    and (host_id in lost or host_id in left_out)
                ]
                wanted |= dict.fromkeys(fitting, lack.text)
                if not fitting:
                    missing.append(scheduler_pb2.MissingHost(wanted=lack.text))
            else:
                wanted.setdefault(lack, "")
        for host_id, text in sorted(wanted.items()):
            host = scheduler_pb2.MissingHost(host_id=host_id, wanted=text)
            status = statuses.get(host_id)
            if status is not None:
                if status.HasField("last_seen"):
                    host.last_seen.CopyFrom(status.last_seen)
                host.left_out = status.refusal
                if status.alive and host_id in left_out:
                    host.left_out = left_out[host_id] or status.suspicion
                if status.alive and not host.left_out:
                    continue  # It takes part in the next round.
            missing.append(host)
        self._tell_changes(missing, statuses)
        return missing

    def _tell_changes(
        self,
        missing: Iterable[scheduler_pb2.MissingHost],
        statuses: Mapping[str, scheduler_pb2.HostStatus],
    ) -> None:
        before, self._told = self._told, {}
        changes: dict[scheduler_pb2.IncidentCode, dict[str, str]] = {}
        for host in missing:
            host_id = host.host_id
            if not host_id:
                continue
            code = self._told[host_id] = _LEFT_OUT if host.left_out else _LOST
            if before.pop(host_id, None) == code:
                continue
            if (status := statuses.get(host_id)) is not None and status.refusal:
                text = f"{host_id} is refused: {status.refusal}"
            elif host.left_out:
                text = f"{host_id} is left out although it sends heartbeats: {host.left_out}"
            elif host.HasField("last_seen"):
                age = time.time() - host.last_seen.ToMilliseconds() / 1000
                silence = f": its last heartbeat was {age:.0f} s ago" if age >= 1 else ""
                text = f"{host_id} is lost{silence}"
            else:
                text = f"{host_id} has not registered since the scheduler was started"
            changes.setdefault(code, {})[host_id] = text
        for host_id in before:
            status = statuses.get(host_id)
            if status is not None and status.alive:
                changes.setdefault(_BACK, {})[host_id] = f"{host_id} is back"
        for code, texts in changes.items():
            if len(texts) > _TOLD_EACH:
                text = f"{next(iter(texts.values()))}; the same is true of {len(texts) - 1} other hosts"
                self._tell(code, text, *texts)
            else:
                for host_id, text in texts.items():
                    self._tell(code, text, host_id)
