"""Identities, signatures, the authority that issues certificates, and the boxes (machines) that join a deployment."""

from collapipe.certificates.identity import Identity as Identity
from collapipe.certificates.identity import Role as Role
