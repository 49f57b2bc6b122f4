"""Sends packets, or frames over a connection, and tells what arrived: run by itself, on both ends of a link in a guest.

With the standard library only: it starts in a tenth of a second where a process is dear.
"""

import json
import socket
import struct
import sys
import time

HEADERS_BYTES = 42
"""Ethernet, IP and UDP of each packet."""
_SILENCE_SECONDS = 2.5
"""After the last packet, or the first that never comes, longer than any link delays one."""
_CATCH_UP_SECONDS = 0.02
_SO_RCVBUFFORCE = 33
"""Of Linux: a larger buffer than an ordinary process may have."""
_BETWEEN_FRAMES_SECONDS = 0.3
_NUMBER = struct.Struct("!I")


def receive(port: int) -> None:
    """Counts packets until none comes for some time, then prints what came."""
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
    # of the queue's first filling and of its last packets, the rate would be another's
    seconds = arrivals[-1][0] - arrivals[0][0] if len(arrivals) > 1 else 0.0
    num_bytes = sum(size for _, size in arrivals[1:])
    rate = 8 * num_bytes / seconds if seconds else 0.0
    print(json.dumps({"packets": len(arrivals), "out_of_order": late, "rate_bps": rate}))


def send(host: str, port: int, rate_bps: float, packets: int, frame_bytes: int) -> None:
    """Sends packets at an even rate."""
    client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    client.connect((host, port))
    payload = bytearray(frame_bytes - HEADERS_BYTES)
    each = 8 * frame_bytes / rate_bps
    due_at = time.monotonic()
    for number in range(packets):
        _NUMBER.pack_into(payload, 0, number)
        # a sleep is coarse, so a few packets at a time; after a pause of the machine, not all that were due meanwhile
        due_at = max(due_at, time.monotonic() - _CATCH_UP_SECONDS)
        ahead = due_at - time.monotonic()
        if ahead > 0.002:
            time.sleep(ahead)
        client.send(payload)
        due_at += each


def receive_frames(port: int, frame_bytes: int) -> None:
    """Prints the rate at which the frames of one connection arrived, each from its first bytes to its last."""
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
    """Sends frames over one connection, each when the one before has arrived and a moment has passed."""
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
