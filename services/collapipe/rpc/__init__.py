"""gRPC, in one place: the only package that knows its options, its credentials and its status codes."""

from collapipe.rpc.channel import ChannelPool, call, open_channel
from collapipe.rpc.credentials import Security
from collapipe.rpc.server import Server, serve
from collapipe.rpc.status import to_error
from collapipe.rpc.streams import (
    SIGN_OF_LIFE_SECONDS,
    Outbox,
    within_silence,
    work_with_signs_of_life,
)

__all__ = [
    "SIGN_OF_LIFE_SECONDS",
    "ChannelPool",
    "Outbox",
    "Security",
    "Server",
    "call",
    "open_channel",
    "serve",
    "to_error",
    "within_silence",
    "work_with_signs_of_life",
]
