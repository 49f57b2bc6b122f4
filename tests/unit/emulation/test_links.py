import pytest

from collapipe.emulation.links import LinkKey, matching_links
from collapipe.errors import InvalidInputError


def test_key_is_written_as_it_is_read() -> None:
    for text in ("a>b", "a>*", "*>b", "*"):
        assert str(LinkKey.parse(text)) == text
    assert str(LinkKey.parse("*>*")) == "*"
    assert str(LinkKey.parse("a>*").reverse) == "*>a"


@pytest.mark.parametrize("text", ["a-b", "a>", ">b", "a>b>c", ""])
def test_text_that_is_not_a_key_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match=repr(text)):
        LinkKey.parse(text)


def test_key_matches_the_links_that_it_includes() -> None:
    ends = [("a", "b"), ("a", "c"), ("c", "b"), ("c", "d")]
    included = {
        text: [LinkKey.parse(text).matches(*pair) for pair in ends]
        for text in ("a>b", "a>*", "*>b", "*")
    }
    assert included == {
        "a>b": [True, False, False, False],
        "a>*": [True, True, False, False],
        "*>b": [True, False, True, False],
        "*": [True, True, True, True],
    }


def test_most_specific_entries_match_those_of_the_sender_first() -> None:
    links = {"*": 0, "*>b": 1, "a>*": 2, "a>b": 3}
    assert matching_links(links, "a", "b") == {"a>b": 3}
    del links["a>b"]
    assert list(matching_links(links, "a", "b").items()) == [("a>*", 2), ("*>b", 1)]
    assert matching_links(links, "c", "d") == {"*": 0}
    assert matching_links({"a>b": 3}, "b", "a") == {}
