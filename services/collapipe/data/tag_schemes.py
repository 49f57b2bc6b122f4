"""The schemes in which files tag the words of entities, and their conversion to IOB2, the scheme of this project.

- IOB2: B- opens every entity, and I- continues it.
- IOB1: I- opens an entity, too. B- opens only one that directly follows another one of its type.
- BIOES, which is also known as IOBES, BILOU and BMEWO: besides, E- or L- ends an entity, S-, U- or W- is an entity of one
  word, and M- continues one.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from collapipe.data.rows import Row, TaggedRow
from collapipe.errors import InvalidInputError

IOB2, IOB1, BIOES = "IOB2", "IOB1", "BIOES"
_IN_IOB2 = {"B": "B", "I": "I"}
_BIOES_IN_IOB2 = _IN_IOB2 | {"M": "I", "E": "I", "L": "I", "S": "B", "U": "B", "W": "B"}
_ENDS = ("E", "L", "S", "U", "W")


def scheme_of(rows: Iterable[Row]) -> str:
    """Returns the scheme of all tags of a file. Without an entity, it is IOB2.

    A file is IOB1 if I- opens an entity somewhere, and B- nowhere opens one that it need not open in IOB1.
    """
    opens = dict.fromkeys(_IN_IOB2, False)
    for row in rows:
        if not isinstance(row, TaggedRow):
            return IOB2
        before = ""
        for tag in row.labels:
            prefix, _, entity_type = tag.partition("-")
            if entity_type and prefix not in _IN_IOB2 and prefix in _BIOES_IN_IOB2:
                return BIOES
            if prefix in opens and entity_type != before:
                opens[prefix] = True
            before = entity_type
    return IOB1 if opens["I"] and not opens["B"] else IOB2


def in_iob2(row: TaggedRow, scheme: str, place: Callable[[int], str]) -> TaggedRow:
    """Returns a sentence with its tags in IOB2.

    Args:
        place: Returns the place of a tag for the message, given its index.

    Raises:
        InvalidInputError: A tag is not of the scheme.
    """
    prefixes = _BIOES_IN_IOB2 if scheme == BIOES else _IN_IOB2
    tags = []
    open_type, before = "", "O"
    for index, tag in enumerate(row.labels):
        prefix, _, entity_type = tag.partition("-")
        if tag == "O":
            open_type = ""
        elif prefix not in prefixes or not entity_type:
            raise InvalidInputError(
                f"{place(index)}: tag {tag!r} is not {scheme}: use O, B-TYPE or I-TYPE, such as B-{entity_type or tag.strip('-') or 'person'}"
            )
        else:
            prefix_in_iob2 = prefixes[prefix]
            if prefix_in_iob2 == "I" and entity_type != open_type:
                if scheme != IOB1:
                    raise InvalidInputError(
                        f"{place(index)}: tag {tag!r} follows {before!r}, so it continues no entity of its type: open the entity "
                        f"with 'B-{entity_type}', as {scheme} does"
                    )
                prefix_in_iob2 = "B"
            open_type = "" if prefix in _ENDS else entity_type
            tag = f"{prefix_in_iob2}-{entity_type}"
        tags.append(tag)
        before = row.labels[index]
    return row if row.labels == tuple(tags) else replace(row, labels=tuple(tags))
