"""The gRPC options of servers, and those that clients and servers must have in common."""

from collapipe.protocol import OURS

PROTOCOL_AGENT = "collapipe-protocol"
"""The name in the user agent of each call, after which the versions of the protocol of the caller come."""

TELLS_VERSIONS = ("grpc.secondary_user_agent", f"{PROTOCOL_AGENT}/{OURS.oldest}-{OURS.newest}")
"""The option of each channel to a service. The service refuses calls of a version that it does not understand."""

KEEPALIVE_SECONDS = 10
"""How often each end checks an idle connection. It notices an unplugged peer long before TCP would."""

KEEPALIVE_TIMEOUT_SECONDS = 20
"""How long bytes may stay without an acknowledgement. At 64 kbit/s, full queues delay it by 8 s, and TCP must be able to
send the bytes once more before the connection counts as dead."""

HANDSHAKE_SECONDS = 10
"""A connection has so long for its handshakes of TLS and HTTP/2."""

MAX_MESSAGE_BYTES = 8 << 20
"""More than any message needs: a chunk has 1 MiB, and the plan of the largest model is smaller."""

COMMON_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A whole chunk fits into one HTTP/2 frame. With the default of 16 KiB, sending takes five times as long.
    ("grpc.http2.max_frame_size", (16 << 20) - 1),
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    TELLS_VERSIONS,
]

SERVER_OPTIONS = [
    *COMMON_OPTIONS,
    # Without these two options, a server would answer the keepalive pings with "too_many_pings".
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_SECONDS * 500),
    ("grpc.http2.max_ping_strikes", 0),
    # Without it, a connection that sends nothing stays for 121 s. A client gives up after 20 s, of which the server sees at
    # most half: it begins to count after the first round trip.
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_SECONDS * 1000),
    # With more calls that nobody has taken in yet, gRPC cancels some of them. A thousand hosts may call at once.
    ("grpc.server.max_pending_requests", 10_000),
    ("grpc.server.max_pending_requests_hard_limit", 20_000),
    # Two servers on one port would share its calls. Instead, the second server fails.
    ("grpc.so_reuseport", 0),
]

_LARGEST_PUBLIC_MESSAGE_BYTES = 64 << 10

PUBLIC_SERVER_OPTIONS = [
    *(option for option in SERVER_OPTIONS if option[0] != "grpc.max_receive_message_length"),
    # Unknown callers get little memory and little time. A few short calls are all that they need.
    ("grpc.max_receive_message_length", _LARGEST_PUBLIC_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", 4),
    ("grpc.max_connection_age_ms", 20_000),
    ("grpc.max_connection_age_grace_ms", 5_000),
]
"""Options of a server that asks callers for no certificate."""
