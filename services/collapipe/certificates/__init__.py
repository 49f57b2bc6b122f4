"""Who is who: the identities in certificates, an authority that makes them, and boxes that join a deployment.

`identity` needs nothing, so that every service can tell its peers; all other modules need `cryptography` (the extra
`certs`), which a device needs only to join.
"""

from collapipe.certificates.identity import Identity, Role

__all__ = ["Identity", "Role"]
