"""Makes channels: options, credentials, retries; one channel a peer."""

import json
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import grpc

from collapipe.certificates.identity import Role
from collapipe.rpc.credentials import Security
from collapipe.rpc.options import COMMON_OPTIONS
from collapipe.rpc.status import to_error

T = TypeVar("T")

_IDEMPOTENT = {
    "collapipe.v1.SchedulerService": [
        "RegisterHost",
        "Heartbeat",
        "ListHosts",
        "ListJobs",
        "GetPlans",
    ],
    "collapipe.v1.DeviceAgentService": ["ProfileBlock"],
}
"""What may be asked again when nobody answered; streams are never retried by gRPC."""

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
    # peers are on the local network: a proxy of the machine's environment does not lead to them
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config", json.dumps(_RETRIES)),
    # a peer that restarted is found again soon: until then, calls that do not wait for it fail at once
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]


def open_channel(address: str, security: Security, role: Role | None = None) -> grpc.Channel:
    """Opens a channel to "host:port"; connects when it is first used.

    Args:
        address: Where the peer serves.
        security: What to show it.
        role: Whom one wants to reach, whatever the address. Without it, the peer's certificate must have the host of
            the address; a host can be shared, or lent to another machine, a role cannot.
    """
    credentials = security.channel_credentials()
    if credentials is None:
        return grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
    return grpc.secure_channel(address, credentials, options=[*_CHANNEL_OPTIONS, *_expecting(role)])


def open_authority_channel(address: str, authority_pem: bytes) -> grpc.Channel:
    """Opens a channel to the authority with this certificate; whoever calls needs none."""
    return grpc.secure_channel(
        address,
        grpc.ssl_channel_credentials(authority_pem),
        options=[*_CHANNEL_OPTIONS, *_expecting(Role.AUTHORITY)],
    )


def _expecting(role: Role | None) -> list[tuple[str, str]]:
    """What a certificate must have instead of the host of the address."""
    return [] if role is None else [("grpc.ssl_target_name_override", role.server_name)]


class ChannelPool:
    """One channel a peer, opened when first needed.

    Args:
        security: What to show to peers.
    """

    def __init__(self, security: Security) -> None:
        self._security = security
        self._lock = threading.Lock()
        self._channels: dict[tuple[str, Role | None], grpc.Channel] = {}

    def channel(self, address: str, role: Role | None = None) -> grpc.Channel:
        """The channel to "host:port", as `open_channel` opens it."""
        with self._lock:
            if (address, role) not in self._channels:
                self._channels[address, role] = open_channel(address, self._security, role)
            return self._channels[address, role]

    def close(self) -> None:
        """Closes every channel; calls in progress end."""
        with self._lock:
            for channel in self._channels.values():
                channel.close()
            self._channels = {}


def call(method: Callable[..., T], request: Any, peer: str, seconds: float) -> T:
    """Makes a unary call with a deadline.

    Raises:
        CollapipeError: What the peer answered with, or `PeerLostError`.
    """
    try:
        return method(request, timeout=seconds)
    except grpc.RpcError as error:
        raise to_error(error, peer) from None
