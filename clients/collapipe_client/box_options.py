"""Reads boxes as the command line names them: `2xpi4:3GB@20mbit` stands for two Raspberry Pi 4."""

import re

from pydantic import ValidationError

from collapipe.emulation.boxes import Box
from collapipe.emulation.links import LinkValues, describe_mistakes
from collapipe.emulation.network_profiles import NETWORK_PROFILES
from collapipe.errors import InvalidInputError
from collapipe_client.quantities import read_bytes, read_rate

BOX_FORM = "[Nx]PROFILE[:MEMORY][@LINK]"
_MOST_BOXES = 1000
_BOX = re.compile(r"(?:(\d+)x)?([^:@]+)(?::([^@]+))?(?:@(.+))?")


def read_boxes(text: str, option: str) -> list[Box]:
    """Reads boxes with commas between them.

    A link is a network profile, or a rate in each direction.

    Raises:
        InvalidInputError: The text has another form, or names an unknown profile. The message names the option.
    """
    boxes = []
    for part in text.split(","):
        match = _BOX.fullmatch(part.strip())
        if match is None or match[1] == "0":
            raise InvalidInputError(
                f"{option}: {part!r} is not of the form {BOX_FORM}, for example 2xpi4:3GB@20mbit or laptop@wifi"
            )
        count, profile, memory, link = match.groups()
        if int(count or 1) > _MOST_BOXES:
            raise InvalidInputError(
                f"{option}: {part!r} names more than {_MOST_BOXES} boxes: give fewer"
            )
        try:
            box = Box(
                profile=profile,
                memory_bytes=None if memory is None else read_bytes(memory),
                link=LinkValues() if link is None else _read_link(link),
            )
        except ValidationError as error:
            raise InvalidInputError(f"{option}: {part!r}: {describe_mistakes(error)}") from None
        boxes += [box] * int(count or 1)
    return boxes


def _read_link(text: str) -> LinkValues:
    if text in NETWORK_PROFILES:
        return LinkValues(profile=text)
    try:
        return LinkValues(rate_bps=read_rate(text))
    except InvalidInputError as error:
        raise InvalidInputError(
            f"{error}; or a network profile: {', '.join(NETWORK_PROFILES)}"
        ) from None
