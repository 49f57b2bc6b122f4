"""The only package that knows gRPC's options, credentials and status codes."""

from collapipe.rpc.channel import ChannelPool, call, open_authority_channel, open_channel
from collapipe.rpc.credentials import Presented, Security
from collapipe.rpc.permissions import check_is_caller
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
    "Presented",
    "Security",
    "Server",
    "call",
    "check_is_caller",
    "open_authority_channel",
    "open_channel",
    "serve",
    "to_error",
    "within_silence",
    "work_with_signs_of_life",
]
