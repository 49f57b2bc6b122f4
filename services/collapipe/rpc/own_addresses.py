"""Which addresses this machine has."""

import errno
import ipaddress
import socket


def is_address_here(host: str) -> bool | None:
    """Returns whether this machine has an IP address; `None` if it is a name, or the system does not say."""
    try:
        ip = ipaddress.ip_address(host)
        family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(ip), 0))
    except ValueError:
        return None
    except OSError as error:
        return False if error.errno == errno.EADDRNOTAVAIL else None
    return True
