"""Identities, the authority that issues certificates, and the boxes that join a deployment.

Every service needs `identity`, which imports no other package. All other modules need the package
`cryptography` (the extra `certs`), which a device uses only to join and to renew its certificate.
"""

from collapipe.certificates.identity import Identity, Role

__all__ = ["Identity", "Role"]
