"""The options that both ends of a connection have to agree on."""

KEEPALIVE_SECONDS = 10
"""A connection is probed this often: a peer that was unplugged is noticed without waiting for TCP."""

MAX_MESSAGE_BYTES = 8 << 20
"""Chunks are 1 MiB; a plan or a step of the largest model stays far below."""

COMMON_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # one chunk in one HTTP/2 frame: a fifth of the time of the default 16 KiB frames
    ("grpc.http2.max_frame_size", (16 << 20) - 1),
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

SERVER_OPTIONS = [
    *COMMON_OPTIONS,
    # the other half of the agreement: without it a server answers such probes with "too_many_pings"
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_SECONDS * 500),
    ("grpc.http2.max_ping_strikes", 0),
    # two servers on one port would share its calls; the second shall fail instead
    ("grpc.so_reuseport", 0),
]

_LARGEST_PUBLIC_MESSAGE_BYTES = 64 << 10

PUBLIC_SERVER_OPTIONS = [
    *(option for option in SERVER_OPTIONS if option[0] != "grpc.max_receive_message_length"),
    # strangers get little memory and little time, and may be back for more: what is asked here is asked once
    ("grpc.max_receive_message_length", _LARGEST_PUBLIC_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", 4),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_age_ms", 20_000),
    ("grpc.max_connection_age_grace_ms", 5_000),
]
"""Of a server that callers need no certificate for."""
