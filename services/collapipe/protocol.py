"""The versions of the protocol that the processes of a deployment speak with each other.

A change needs a new version if an older process would misunderstand it: messages that mean something else, or come in another order. A new
field or method that an older process can do without needs none.
"""

from collapipe.v1.enrollment_pb2 import ProtocolVersions

OURS = ProtocolVersions(oldest=1, newest=2)
"""A process that tells no versions is older than version 1."""

NAMES_ITS_PROCESS = 2
"""From this version on, the health service of a host can be asked by the incarnation of its process."""


def why_not_understood(
    peer: str, theirs: ProtocolVersions, own_name: str, ours: ProtocolVersions = OURS
) -> str:
    """Returns why two sides have no version in common, and what to update; "" if they have one.

    Args:
        own_name: Names this side.
    """
    if theirs.oldest <= ours.newest and ours.oldest <= theirs.newest:
        return ""
    older = peer if theirs.newest < ours.oldest else own_name
    return (
        f"{peer} speaks {_in_words(theirs)} of the protocol of CollaPipe, and {own_name} {_in_words(ours)}: update CollaPipe "
        f"on the machine of {older}"
    )


def _in_words(versions: ProtocolVersions) -> str:
    if versions.oldest == versions.newest:
        return f"version {versions.newest}"
    return f"versions {versions.oldest} to {versions.newest}"
