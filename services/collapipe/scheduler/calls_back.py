"""Calls hosts back at the addresses that they register, so that only those are present that others can reach."""

from collapipe.errors import CollapipeError, WrongStateError
from collapipe.protocol import NAMES_ITS_PROCESS
from collapipe.rpc import ChannelPool, check_serves, has_ended
from collapipe.v1 import scheduler_pb2
from collapipe.v1.enrollment_pb2 import ProtocolVersions

_CALL_SECONDS = 4.0

_TWIN_SECONDS = 2.0


def check_is_reached(
    host: scheduler_pb2.Host, versions: ProtocolVersions, channels: ChannelPool
) -> None:
    """Calls a host at its address, over a new connection.

    Args:
        versions: The versions of the protocol that the host speaks.

    Raises:
        WrongStateError: Nothing answers there in time, or another process does.
    """
    process = host.incarnation if versions.newest >= NAMES_ITS_PROCESS else ""
    try:
        with channels.new_connection(host.address) as channel:
            check_serves(channel, host.address, _CALL_SECONDS, process)
    except CollapipeError as error:
        raise WrongStateError(
            f"the scheduler cannot call {host.host_id} back at {host.address}, where others would have to reach it: {error}. "
            "Correct --advertise, or open the port in its firewall"
        ) from None


def find_twin(
    host: scheduler_pb2.Host, present: scheduler_pb2.Host | None, channels: ChannelPool
) -> str:
    """Returns why a new process may not register, because the one that has its name still runs; "" if it has ended.

    Args:
        present: The host of this name that sends heartbeats; `None` if there is none.
    """
    if present is None or present.address == host.address:
        return ""  # Two processes cannot listen on one address.
    if present.incarnation == host.incarnation:
        return ""
    with channels.new_connection(present.address) as channel:
        if has_ended(channel, present.incarnation, _TWIN_SECONDS):
            return ""
    return (
        f"another process at {present.address} is registered as host {host.host_id!r} and sends heartbeats, so the one at "
        f"{host.address} takes no part: give each host its own --host-id, or stop one of the two processes"
    )
