"""Opens channels with options, credentials and retries, and makes unary calls."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from collapipe.certificates.identity import Role
from collapipe.errors import NotFoundError, PeerLostError
from collapipe.rpc.call_shaping import ShapedCalls
from collapipe.rpc.credentials import Security
from collapipe.rpc.options import COMMON_OPTIONS
from collapipe.rpc.status import to_error
from collapipe.traffic_shaping.outgoing_links import OutgoingLinks, SharedLink

T = TypeVar("T")

_IDEMPOTENT = {
    "collapipe.v1.SchedulerService": [
        "RegisterHost",
        "Heartbeat",
        "ListHosts",
        "ListJobs",
        "GetPlans",
    ],
    "collapipe.v1.ProfileService": ["ProfileBlock"],
}
"""Unary calls that gRPC repeats if the server is unavailable."""

_RETRIES = {
    "methodConfig": [
        {
            "name": [
                {"service": service, "method": method}
                for service, methods in _IDEMPOTENT.items()
                for method in methods
            ],
            "retryPolicy": {
                "maxAttempts": 3,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}

_CHANNEL_OPTIONS = [
    *COMMON_OPTIONS,
    # Peers are on the local network, and the proxy of this machine does not lead there.
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config", json.dumps(_RETRIES)),
    # A peer that restarted is found again soon. Until then, calls without `wait_for_ready` fail at once.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]

_REASON_SECONDS = 1.0
"""How long to wait for the reason why a peer cannot be reached."""

_MOST_CHANNELS = 4096
"""Far more than a scheduler with 1,200 hosts needs. A host that starts again may have another port each time."""

_SERVING = health_pb2.HealthCheckResponse.SERVING

_OWN_CONNECTION = ("grpc.use_local_subchannel_pool", 1)
"""Without this option, channels to the same peer share one connection."""


def open_channel(
    address: str, security: Security, role: Role | None = None, *, for_weights: bool = False
) -> grpc.Channel:
    """Opens a channel to "host:port", which connects when it is first used.

    Args:
        role: The role that the peer's certificate must have. Without a role, the certificate must name the
            host of the address. Another machine can take over an address, but not a role.
        for_weights: Whether the channel has a connection of its own.
    """
    options = [*_CHANNEL_OPTIONS, *_expecting(role), *([_OWN_CONNECTION] if for_weights else [])]
    credentials = security.channel_credentials()
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


def open_authority_channel(address: str, authority_pem: bytes) -> grpc.Channel:
    """Opens a channel to the authority with the given certificate. The caller needs no certificate."""
    return grpc.secure_channel(
        address,
        grpc.ssl_channel_credentials(authority_pem),
        options=[*_CHANNEL_OPTIONS, *_expecting(Role.AUTHORITY)],
    )


def _expecting(role: Role | None) -> list[tuple[str, str]]:
    """Returns the option that makes gRPC check the role of the peer instead of its host."""
    return [] if role is None else [("grpc.ssl_target_name_override", role.server_name)]


class ChannelPool:
    """Opens a channel to each peer on first use, and keeps it for later calls. Forgets the one that was used least recently if there
    are more than `_MOST_CHANNELS`.

    Args:
        links: The links that leave this host; `None` for a process that is no host. The calls of a host name the
            host, and share the links with its other traffic.
    """

    def __init__(self, security: Security, links: OutgoingLinks | None = None) -> None:
        self._security = security
        self._links = links
        self._lock = threading.Lock()
        self._credentials: grpc.ChannelCredentials | None = None
        self._channels: dict[tuple[str, Role | None, bool], grpc.Channel] = {}
        self._former_channels: dict[tuple[str, Role | None, bool], grpc.Channel] = {}
        """Those of the certificate before the last renewal, which calls in progress still use."""

    @property
    def security(self) -> Security:
        """How this process authenticates itself."""
        return self._security

    def channel(
        self, address: str, role: Role | None = None, *, for_weights: bool = False
    ) -> grpc.Channel:
        """Returns the channel to "host:port"; see `open_channel`.

        Weights have a connection of their own. The kernel takes in many bytes of a connection at once. On a slow
        link, signs of life behind these bytes would come too late.

        After a renewal of the certificate, the channel is a new one, because an old one could not connect again for ever. So
        ask for the channel before each call.
        """
        key = address, role, for_weights
        with self._lock:
            credentials = self._security.channel_credentials()
            if credentials is not self._credentials:
                # gRPC closes a forgotten channel as soon as its last call has ended.
                self._former_channels, self._channels = self._channels, {}
                self._credentials = credentials
            channel = self._channels.pop(key, None)
            if channel is None:
                channel = self._open(address, role, for_weights=for_weights)
            self._channels[key] = channel  # as the last one, which was used most recently
            if len(self._channels) > _MOST_CHANNELS:
                del self._channels[next(iter(self._channels))]
            return channel

    def _open(self, address: str, role: Role | None, *, for_weights: bool) -> grpc.Channel:
        channel = open_channel(address, self._security, role, for_weights=for_weights)
        if self._links is None:
            return channel
        return grpc.intercept_channel(channel, ShapedCalls(self._links, address))

    @contextmanager
    def new_connection(self, address: str) -> Iterator[grpc.Channel]:
        """Yields a channel to "host:port" with a connection of its own, which ends with the block. It shows whether the peer
        accepts connections: a firewall may block new ones, and let old ones go on."""
        with self._open(address, None, for_weights=True) as channel:
            yield channel

    def link(self, address: str) -> SharedLink:
        """Returns the link to the host at "host:port", for streams that send much data."""
        return (self._links or OutgoingLinks.unlimited()).link_at(address)

    def know(self, host_id: str, address: str) -> None:
        """Remembers which host serves at "host:port", so that calls share the link to it."""
        if self._links is not None:
            self._links.link_to(host_id, address)

    def close(self) -> None:
        """Closes every channel, and ends calls in progress."""
        with self._lock:
            for channel in (*self._former_channels.values(), *self._channels.values()):
                channel.close()
            self._former_channels, self._channels = {}, {}


def call(method: Callable[..., T], request: Any, peer: str, seconds: float) -> T:
    """Makes a unary call with a deadline.

    Args:
        peer: Names the peer in errors.

    Raises:
        CollapipeError: The error that the peer answered with, or `PeerLostError`.
    """
    try:
        return method(request, timeout=seconds)
    except grpc.RpcError as error:
        raise to_error(error, peer) from None


def check_serves(channel: grpc.Channel, peer: str, seconds: float, process: str = "") -> None:
    """Asks the health service of a peer (grpc.health.v1).

    Args:
        peer: Names the peer in errors.
        process: The incarnation that has to answer; empty for any process.

    Raises:
        PeerLostError: The peer does not serve, does not answer in time, or is another process.
        CollapipeError: Any other error that the peer answered with.
    """
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        answer = call(stub.Check, health_pb2.HealthCheckRequest(service=process), peer, seconds)
    except NotFoundError:
        raise PeerLostError(
            peer, f"another process answers there: {peer} is not the one that is meant"
        ) from None
    if answer.status != _SERVING:
        names = health_pb2.HealthCheckResponse.ServingStatus
        status = names.Name(answer.status) if answer.status in names.values() else answer.status
        raise PeerLostError(peer, f"the service at {peer} is {status}: see its log")


def has_ended(channel: grpc.Channel, process: str, seconds: float) -> bool:
    """Returns whether a process has ended or is about to. A process that does not answer in time may only be busy.

    Args:
        process: Its incarnation, which its health service knows.
    """
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        answer = stub.Check(health_pb2.HealthCheckRequest(service=process), timeout=seconds)
    except grpc.RpcError as error:
        return (
            error.code() is grpc.StatusCode.UNAVAILABLE
        )  # Nothing listens, or no way leads there.
    return bool(answer.status == health_pb2.HealthCheckResponse.NOT_SERVING)


def why_unreachable(channel: grpc.Channel, peer: str) -> str:
    """Says why no connection to a peer can be made, with the remedy; "" if there is one, or the reason is unknown.

    A call with `wait_for_ready` does not tell what it waits for.
    """
    try:
        stub = health_pb2_grpc.HealthStub(channel)
        stub.Check(health_pb2.HealthCheckRequest(), timeout=_REASON_SECONDS)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return str(to_error(error, peer))
    return ""
