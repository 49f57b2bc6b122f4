import pytest

from collapipe.printable import printable


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Grüße, 世界 \U0001f468\u200d\U0001f469\xa0!", None),
        ("\x1b[31m", r"\x1b[31m"),
        ("\x9b2J\x7f\x00\x07", r"\x9b2J\x7f\x00\x07"),
        ("one\ntwo\r\n\tthree", r"one\ntwo\r\n\tthree"),
        ("\u2028\u2029\x85\x0b\x0c\x1c", r"\u2028\u2029\x85\x0b\x0c\x1c"),
        ("\u202eabc\u202c\u2066\u2069", r"\u202eabc\u202c\u2066\u2069"),
        ("\ud800", r"\ud800"),
    ],
)
def test_what_a_terminal_or_a_log_would_obey_is_escaped(text: str, expected: str | None) -> None:
    assert printable(text) == (text if expected is None else expected)


def test_kept_characters_stay() -> None:
    assert printable("a\n\tb\x1b", keep="\n\t") == "a\n\tb\\x1b"
