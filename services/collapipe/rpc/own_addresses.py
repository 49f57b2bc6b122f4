"""Which addresses this machine has."""

import ipaddress

import psutil


def is_address_here(host: str) -> bool | None:
    """Returns whether an interface of this machine has an IP address; `None` if it is a name."""
    try:
        wanted = ipaddress.ip_address(host)
    except ValueError:
        return None
    return wanted.is_loopback or any(
        ipaddress.ip_address(own.address.partition("%")[0]) == wanted
        for addresses in psutil.net_if_addrs().values()
        for own in addresses
        if own.family.name in ("AF_INET", "AF_INET6")
    )
