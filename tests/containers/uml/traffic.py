"""Measures a link in a guest: sends packets, or frames over a TCP connection, and reports what arrived.

One process runs at each end of the link. The script imports only the standard library, because imports are
slow in a guest.
"""

import json
import socket
import struct
import sys
import time

HEADERS_BYTES = 42
"""Size of the Ethernet, IP and UDP headers of a packet."""
_SILENCE_SECONDS = 2.5
"""The receiver stops after this time without a packet. It is longer than the delay of any link."""
_CATCH_UP_SECONDS = 0.02
_SO_RCVBUFFORCE = 33
"""A socket option of Linux that sets a receive buffer above the usual limit."""
_BETWEEN_FRAMES_SECONDS = 0.3
_NUMBER = struct.Struct("!I")


def receive(port: int) -> None:
    """Counts packets until none arrives for some time, then prints the counts and the rate."""
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 8 << 20)
    server.bind(("", port))
    print("ready", flush=True)
    server.settimeout(20.0)
    buffer = bytearray(2048)
    arrivals: list[tuple[float, int]] = []
    late, last = 0, -1
    try:
        while True:
            size = server.recv_into(buffer)
            arrivals.append((time.monotonic(), size + HEADERS_BYTES))
            (number,) = _NUMBER.unpack_from(buffer)
            late += number < last
            last = max(last, number)
            if len(arrivals) == 1:
                server.settimeout(_SILENCE_SECONDS)
    except TimeoutError:
        pass
    # The first packet only starts the clock, so its bytes do not count.
    seconds = arrivals[-1][0] - arrivals[0][0] if len(arrivals) > 1 else 0.0
    num_bytes = sum(size for _, size in arrivals[1:])
    rate = 8 * num_bytes / seconds if seconds else 0.0
    print(json.dumps({"packets": len(arrivals), "out_of_order": late, "rate_bps": rate}))


def send(host: str, port: int, rate_bps: float, packets: int, frame_bytes: int) -> None:
    """Sends packets at a constant rate."""
    client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    client.connect((host, port))
    payload = bytearray(frame_bytes - HEADERS_BYTES)
    each = 8 * frame_bytes / rate_bps
    due_at = time.monotonic()
    for number in range(packets):
        _NUMBER.pack_into(payload, 0, number)
        # Short sleeps are not exact, so several packets may be sent at once. But the packets that were due
        # during a long pause of the machine must not be sent in one burst.
        due_at = max(due_at, time.monotonic() - _CATCH_UP_SECONDS)
        ahead = due_at - time.monotonic()
        if ahead > 0.002:
            time.sleep(ahead)
        client.send(payload)
        due_at += each


def receive_frames(port: int, frame_bytes: int) -> None:
    """Prints the rate of the frames of one connection, each timed from its first byte to its last."""
    server = socket.create_server(("", port))
    print("ready", flush=True)
    connection, _ = server.accept()
    total, seconds = 0, 0.0
    while data := connection.recv(1 << 16):
        began_at, left = time.monotonic(), frame_bytes - len(data)
        while left and (data := connection.recv(min(left, 1 << 16))):
            left -= len(data)
        seconds += time.monotonic() - began_at
        total += frame_bytes - left
        connection.sendall(b"!")
    print(json.dumps({"rate_bps": 8 * total / seconds}))


def send_frames(host: str, port: int, frame_bytes: int, count: int) -> None:
    """Sends frames over one connection. After each, waits for its acknowledgement, and pauses."""
    with socket.create_connection((host, port)) as connection:
        for _ in range(count):
            connection.sendall(bytes(frame_bytes))
            connection.recv(1)
            time.sleep(_BETWEEN_FRAMES_SECONDS)


if __name__ == "__main__":
    name, *given = sys.argv[1:]
    if name == "receive":
        receive(int(given[0]))
    elif name == "send":
        send(given[0], int(given[1]), float(given[2]), int(given[3]), int(given[4]))
    elif name == "receive-frames":
        receive_frames(int(given[0]), int(given[1]))
    else:
        send_frames(given[0], int(given[1]), int(given[2]), int(given[3]))
