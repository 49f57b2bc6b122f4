"""Segmentation offload of a network interface.

With offload, the kernel passes up to 64 KiB of a connection to the interface as one packet, and netem would
delay, count and lose them as one packet. Connections that exist before a change keep their setting.
"""

import array
import contextlib
import fcntl
import socket
import struct
from collections.abc import Iterable

_SIOCETHTOOL = 0x8946
_OFFLOADS = {"tso": (0x1E, 0x1F), "gso": (0x23, 0x24)}
"""The ethtool commands that read and set each offload."""


def switch_offloads_off(interface: str) -> list[str]:
    """Makes packets leave one by one, and returns the names of the offloads that were on."""
    were_on = []
    for name, (read, write) in _OFFLOADS.items():
        with contextlib.suppress(OSError):  # The interface does not have this offload.
            if _ethtool(interface, read):
                _ethtool(interface, write, 0)
                were_on.append(name)
    return were_on


def switch_offloads_on(interface: str, names: Iterable[str]) -> None:
    """Restores the offloads that `switch_offloads_off` returned."""
    for name in names:
        with contextlib.suppress(OSError, KeyError):
            _ethtool(interface, _OFFLOADS[name][1], 1)


def _ethtool(interface: str, command: int, value: int = 0) -> int:
    data = array.array("I", [command, value])
    request = struct.pack("16sP16x", interface.encode(), data.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control.fileno(), _SIOCETHTOOL, request)
    return data[1]
