"""The hosts that have registered with the scheduler."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from google.protobuf.timestamp_pb2 import Timestamp

from collapipe.errors import CollapipeError, NotFoundError, PeerLostError, WrongStateError
from collapipe.telemetry import metrics
from collapipe.v1 import scheduler_pb2

logger = logging.getLogger(__name__)

DEVICE_AGENT = scheduler_pb2.HOST_ROLE_DEVICE_AGENT
CONTROL_UNIT = scheduler_pb2.HOST_ROLE_CONTROL_UNIT
EDGE_SERVER = scheduler_pb2.HOST_ROLE_EDGE_SERVER
ROLE_NAMES = {
    role: scheduler_pb2.HostRole.Name(role).removeprefix("HOST_ROLE_")
    for role in (DEVICE_AGENT, CONTROL_UNIT, EDGE_SERVER)
}
"""The name of the role that a host registers. `certificates.Role` has the same names."""

HEARTBEAT_SECONDS = 2.0
MOST_HEARTBEAT_SECONDS = 3.5
"""The time between the heartbeats of a host: the shorter one with up to 400 hosts, the longer one with 700 or more."""
_HEARTBEATS_PER_SECOND = 200
"""Each takes about 1 ms of the scheduler."""

SILENCE_SECONDS = 5 * HEARTBEAT_SECONDS
"""A host counts as dead after this time without a heartbeat. A single lost heartbeat does no harm."""


_MOST_HOSTS = 4096
"""Most hosts that are known at a time. A scheduler cannot serve so many. When one more registers, the host that has been silent for
the longest time is forgotten."""

_SUSPICION_SECONDS, _LONGEST_SUSPICION_SECONDS = 10.0, 60.0
"""First and longest time for which a suspect is left out."""

_MOST_CHARACTERS = 1000
"""Most characters that are kept of what a host says of its links."""

_MOST_STARTS, _STARTS_SECONDS = 6, 60.0
"""A host that registers more new processes in this time is a suspect. Otherwise one that does so all the time would end every
attempt, because an attempt ends when a host was restarted."""


@dataclass(frozen=True)
class _Suspect:
    """A host that others could not reach. `seconds` after `since`, it may take part again."""

    since: float
    seconds: float
    reason: str


_REFUSED_SECONDS = 60.0
"""How long a refused host is known. It tries again at least every 10 s."""


@dataclass(frozen=True)
class _Refused:
    """A host that may not register. `is_twin` says that it is refused for the sake of a host that is alive."""

    at: float
    host: scheduler_pb2.Host
    reason: str
    is_twin: bool


class HostRegistry:
    """All hosts that have registered, in the order of their first registration. It is thread-safe.

    Args:
        clock: Returns a time in seconds from any fixed start.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._hosts: dict[str, scheduler_pb2.Host] = {}
        self._last_seen: dict[str, float] = {}
        self._unshaped: dict[str, str] = {}
        """Why links are not shaped as they should be, for hosts with such links."""
        self._suspects: dict[str, _Suspect] = {}
        self._unreached: set[str] = set()
        """Hosts that others could not reach since their last registration. They do not count as alive."""
        self._starts: dict[str, deque[float]] = {}
        """When the last processes of each host registered."""
        self._refused: dict[str, _Refused] = {}
        """Hosts whose last registration was refused."""
        for role, name in ROLE_NAMES.items():
            # Counting 1,200 hosts takes 0.5 ms, and they send 600 heartbeats in a second.
            metrics.HOSTS.labels(name.lower()).set_function(partial(self._count_alive, role))

    @property
    def heartbeat_seconds(self) -> float:
        """The time between two heartbeats of a host."""
        fair = len(self._hosts) / _HEARTBEATS_PER_SECOND
        return min(max(HEARTBEAT_SECONDS, fair), MOST_HEARTBEAT_SECONDS)

    def register(self, host: scheduler_pb2.Host) -> None:
        """Adds a host. A host that registers again after a restart keeps its place in the order."""
        with self._lock:
            before, now = self._hosts.get(host.host_id), self._clock()
            is_new = before is None or before.incarnation != host.incarnation
            if is_new:
                starts = self._starts.setdefault(host.host_id, deque(maxlen=_MOST_STARTS + 1))
                starts.append(now)
                restarts = len(starts) > _MOST_STARTS and now - starts[0] < _STARTS_SECONDS
                if restarts:
                    reason = f"it has registered more than {_MOST_STARTS} times in {_STARTS_SECONDS:.0f} s: look at its log"
                    if getattr(self._suspects.get(host.host_id), "reason", "") != reason:
                        logger.warning(
                            "%s is left out for a while, because %s", host.host_id, reason
                        )
                    self._suspects[host.host_id] = _Suspect(now, _LONGEST_SUSPICION_SECONDS, reason)
                else:
                    self._suspects.pop(host.host_id, None)
                if before is not None and not restarts:
                    logger.info(
                        "%s registered again from %s (previously from %s): it was restarted, or two processes use the "
                        "same host id",
                        host.host_id,
                        host.address,
                        before.address,
                    )
            self._refused.pop(host.host_id, None)
            self._unreached.discard(host.host_id)
            self._hosts[host.host_id] = host
            self._last_seen[host.host_id] = now
            if len(self._hosts) > _MOST_HOSTS:
                self._forget(min(self._last_seen, key=self._last_seen.__getitem__))

    def refuse(self, host: scheduler_pb2.Host, reason: str, *, is_twin: bool = False) -> None:
        """Takes note that a host may not register. It does not harm a process of the same host that is alive.

        Args:
            is_twin: Whether such a process is the reason.
        """
        with self._lock:
            self._refused.pop(host.host_id, None)
            self._refused[host.host_id] = _Refused(
                self._clock(), host, reason, is_twin
            )  # as the last one
            if len(self._refused) > _MOST_HOSTS:
                del self._refused[next(iter(self._refused))]

    def _forget(self, host_id: str) -> None:
        for known in (
            self._hosts,
            self._last_seen,
            self._unshaped,
            self._suspects,
            self._starts,
        ):
            known.pop(host_id, None)
        self._unreached.discard(host_id)

    def suspect(self, host: str, reason: str) -> None:
        """Counts a host as dead until it registers again. It can do so only if the scheduler can call it back. After that, it is a suspect
        for a while. A restart ends both.

        The time doubles with each suspicion: the scheduler may reach a host that others cannot reach.

        Args:
            host: Its id or its address. An unknown name changes nothing.
            reason: Why it is blamed.
        """
        with self._lock:
            for host_id, known in self._hosts.items():
                if host in (host_id, known.address):
                    before = self._suspects.get(host_id)
                    seconds = 2 * before.seconds if before else _SUSPICION_SECONDS
                    seconds = min(seconds, _LONGEST_SUSPICION_SECONDS)
                    self._suspects[host_id] = _Suspect(self._clock(), seconds, reason)
                    self._unreached.add(host_id)

    def heartbeat(self, host_id: str, incarnation: str, unshaped: str = "") -> scheduler_pb2.Host:
        """Records that a host is alive, and returns it.

        Args:
            unshaped: Why its links are not shaped as they should be; "" if they are.

        Raises:
            NotFoundError: The host is not registered, or a job has suspected it since.
            WrongStateError: Another process has registered under the same host id since.
        """
        with self._lock:
            host = self._hosts.get(host_id)
            if host is None:
                raise NotFoundError(f"host {host_id!r} is not registered: register it again")
            if host.incarnation != incarnation:
                raise WrongStateError(
                    f"another process has registered as host {host_id!r}: give each host its own --host-id, or stop "
                    "one of the two processes"
                )
            if host_id in self._unreached:
                raise NotFoundError(f"a job could not reach host {host_id!r}: register it again")
            self._last_seen[host_id] = self._clock()
            if unshaped:
                self._unshaped[host_id] = unshaped[:_MOST_CHARACTERS]
            else:
                self._unshaped.pop(host_id, None)
            return host

    def alive(self, *, suspects: bool = True) -> list[scheduler_pb2.Host]:
        """Returns the hosts whose last heartbeat is recent, in registration order.

        Args:
            suspects: Whether suspects are among them, if they have registered since.
        """
        with self._lock:
            hosts = [host for host in self._hosts.values() if self._is_alive(host)]
            return [host for host in hosts if suspects or not self._is_left_out(host)]

    def registered(self) -> list[scheduler_pb2.Host]:
        """Returns every host that is known, in registration order."""
        with self._lock:
            return list(self._hosts.values())

    def heard_as(self, host_id: str) -> scheduler_pb2.Host | None:
        """Returns the host of an id whose last heartbeat is recent, even if a job has blamed it since."""
        with self._lock:
            host = self._hosts.get(host_id)
            return host if host is not None and self._silence(host) <= SILENCE_SECONDS else None

    def heard(self) -> list[scheduler_pb2.Host]:
        """Returns the hosts whose last heartbeat is recent, even if a job has blamed them since."""
        with self._lock:
            return [h for h in self._hosts.values() if self._silence(h) <= SILENCE_SECONDS]

    def statuses(self) -> list[scheduler_pb2.HostStatus]:
        """Returns the state of every host that has registered."""
        with self._lock:
            return [self._status(host) for host in self._hosts.values()]

    def refused(self) -> list[scheduler_pb2.HostStatus]:
        """Returns the hosts that have not registered, because they were refused lately."""
        with self._lock:
            return [
                scheduler_pb2.HostStatus(host=each.host, refusal=self.refusal(host_id))
                for host_id, each in self._refused.items()
                if host_id not in self._hosts and self.refusal(host_id)
            ]

    def refusal(self, host_id: str) -> str:
        """Returns why a host was refused lately; "" if it was not."""
        refused = self._refused.get(host_id)
        is_late = refused is not None and self._clock() - refused.at <= _REFUSED_SECONDS
        return refused.reason if refused is not None and is_late else ""

    def explain(self, error: CollapipeError) -> str:
        """Returns the text of an error. An error about an address also names the host there."""
        if isinstance(error, PeerLostError):
            for status in self.statuses():
                if error.host_id == status.host.address:
                    return f"{status.host.host_id} is lost: {error}"
        return str(error)

    def _status(self, host: scheduler_pb2.Host) -> scheduler_pb2.HostStatus:
        status = scheduler_pb2.HostStatus(host=host, alive=self._is_alive(host))
        status.last_seen.CopyFrom(timestamp_after(-self._silence(host)))
        if status.alive:
            status.unshaped = self._unshaped.get(host.host_id, "")
        if refusal := self.refusal(host.host_id):
            refused = self._refused[host.host_id]
            if not status.alive:
                status.refusal = refusal
            elif refused.is_twin:
                status.twin_address = refused.host.address
        if self._is_left_out(host):
            suspect = self._suspects[host.host_id]
            left = suspect.since + suspect.seconds - self._clock()
            status.suspicion = suspect.reason
            status.suspected_until.CopyFrom(timestamp_after(left))
        return status

    def _is_alive(self, host: scheduler_pb2.Host) -> bool:
        return host.host_id not in self._unreached and self._silence(host) <= SILENCE_SECONDS

    def _is_left_out(self, host: scheduler_pb2.Host) -> bool:
        suspect = self._suspects.get(host.host_id)
        return suspect is not None and self._clock() <= suspect.since + suspect.seconds

    def _silence(self, host: scheduler_pb2.Host) -> float:
        return self._clock() - self._last_seen[host.host_id]

    def _count_alive(self, role: int) -> int:
        """Returns how many hosts of a role are alive, for each scrape."""
        return sum(host.role == role for host in self.alive())


def timestamp_after(seconds: float) -> Timestamp:
    """Returns the time of day some seconds from now."""
    timestamp = Timestamp()
    timestamp.FromMilliseconds(int((time.time() + seconds) * 1000))
    return timestamp
