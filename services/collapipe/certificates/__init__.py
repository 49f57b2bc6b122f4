"""Identities, the authority that issues certificates, and the boxes (machines) that join a deployment.

Every service imports `identity`. All other modules need the package `cryptography` (the extra `certs`). A
device uses them only to join and to renew its certificate.
"""

from collapipe.certificates.identity import Identity as Identity
from collapipe.certificates.identity import Role as Role
