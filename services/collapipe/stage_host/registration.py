"""Keeps a host registered with the scheduler."""

import logging
import threading
from collections.abc import Callable

from google.protobuf.duration_pb2 import Duration

from collapipe.certificates import Role
from collapipe.errors import (
    CancelledError,
    CollapipeError,
    NotFoundError,
    NotPermittedError,
    PeerLostError,
    WrongStateError,
)
from collapipe.protocol import why_not_understood
from collapipe.rpc import ChannelPool, call, is_address_here
from collapipe.stage_host.job_deletion import JobDeletion
from collapipe.v1 import scheduler_pb2, scheduler_pb2_grpc
from collapipe.weights.blob_store import JobStores

logger = logging.getLogger(__name__)

_DEADLINE_SECONDS = 5.0
_REGISTER_SECONDS = 10.0
"""Deadline of a registration, for which the scheduler calls this host back."""
_RETRY_SECONDS = 1.0
_MOST_RETRY_SECONDS = 10.0
_UPDATE_SECONDS = 300.0
"""The wait after a scheduler of another version has registered this host. Such a scheduler then counts it as alive for 10 s."""


class _OtherVersionError(Exception):
    """The scheduler understands no version of the protocol that this host speaks."""


class Registration:
    """Registers a host and then sends heartbeats, until it is closed.

    It retries without end, because a device may be switched on before its scheduler.

    Args:
        host: With an incarnation that no other process has.
        stores: The jobs on the disk of the host, of which it deletes those that the scheduler has deleted. `None` if it keeps
            none.
        unshaped: Returns why its links are not shaped as they should be; "" if they are.
    """

    def __init__(
        self,
        host: scheduler_pb2.Host,
        scheduler: str,
        channels: ChannelPool,
        stores: JobStores | None = None,
        unshaped: Callable[[], str] = str,
    ) -> None:
        self._host = host
        self._scheduler = scheduler
        self._channels = channels
        self._deletion = JobDeletion(stores) if stores is not None else None
        self._num_deletions = 0
        self._has_address = self._is_address_here()
        self._unshaped = unshaped
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="registration", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        failures = 0
        while not self._closed.is_set():
            try:
                interval = self._register()
                logger.info("registered with the scheduler at %s", self._scheduler)
                failures = 0
                while not self._closed.wait(interval) and not self._has_moved():
                    interval = self._heartbeat() or interval
            except _OtherVersionError as error:
                logger.error("%s", error)
                self._closed.wait(_UPDATE_SECONDS)
            except NotFoundError as error:
                logger.info("registering again, because the scheduler says: %s", error)
            except WrongStateError as error:
                logger.warning("%s", error)
                self._closed.wait(min(_RETRY_SECONDS * 2 ** min(failures, 10), _MOST_RETRY_SECONDS))
                failures += 1
            # A busy scheduler may end a call at its deadline before this host does. The call then looks cancelled.
            except (PeerLostError, CancelledError) as error:
                failures += 1
                if failures & (failures - 1) == 0:  # 1, 2, 4, 8 and so on: it may be away for days.
                    logger.info("cannot reach the scheduler (try %d): %s", failures, error)
                self._closed.wait(_RETRY_SECONDS)
            except CollapipeError as error:
                logger.error("the scheduler refuses this host: %s", error)
                self._closed.wait(_MOST_RETRY_SECONDS)

    def _register(self) -> float:
        request = scheduler_pb2.RegisterHostRequest(host=self._host)
        answer = call(self._stub().RegisterHost, request, "the scheduler", _REGISTER_SECONDS)
        if why := why_not_understood("the scheduler", answer.protocol, self._host.host_id):
            raise _OtherVersionError(why)
        # It may be another scheduler, or one whose state was restored.
        self._num_deletions = 0
        self._learn_revoked(answer)  # before the first grant counts
        self._channels.security.learn_least_grant(answer.least_grant, anew=True)
        return _seconds(answer.heartbeat_interval)

    def _heartbeat(self) -> float:
        request = scheduler_pb2.HeartbeatRequest(
            host_id=self._host.host_id,
            incarnation=self._host.incarnation,
            num_deletions=self._num_deletions,
            revoked_keys_sha256=self._channels.security.revoked.sha256,
            unshaped=self._unshaped(),
        )
        answer = call(self._stub().Heartbeat, request, "the scheduler", _DEADLINE_SECONDS)
        self._channels.security.learn_least_grant(answer.least_grant)
        self._learn_revoked(answer)
        if self._deletion is not None:
            self._deletion.go_on(answer.deleted_job_ids)
        self._num_deletions = answer.num_deletions
        return _seconds(answer.heartbeat_interval)

    def _has_moved(self) -> bool:
        """Returns whether this machine has lost the address that others call, or has it again, since the last look. Then the host has
        to register again: the scheduler finds out whether others can still reach it."""
        before, self._has_address = self._has_address, self._is_address_here()
        if before and self._has_address is False:
            logger.error(
                "this machine has lost the address %s, which other hosts call: give it that address again, or correct --advertise "
                "and restart the service",
                self._host.address,
            )
        return None not in (before, self._has_address) and before != self._has_address

    def _is_address_here(self) -> bool | None:
        return is_address_here(self._host.address.rpartition(":")[0].strip("[]"))

    def _learn_revoked(
        self, answer: scheduler_pb2.RegisterHostResponse | scheduler_pb2.HeartbeatResponse
    ) -> None:
        if answer.HasField("revoked_keys"):
            try:
                self._channels.security.learn_revoked(answer.revoked_keys)
            except NotPermittedError as error:
                logger.error("%s", error)

    def _stub(self) -> scheduler_pb2_grpc.SchedulerServiceStub:
        channel = self._channels.channel(self._scheduler, Role.SCHEDULER)
        return scheduler_pb2_grpc.SchedulerServiceStub(channel)


def _seconds(interval: Duration) -> float:
    return float(interval.ToTimedelta().total_seconds())
