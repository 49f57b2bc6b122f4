import pytest

from collapipe.errors import InvalidInputError
from collapipe_client.quantities import (
    read_bytes,
    read_rate,
    read_ratio,
    read_seconds,
    say_age,
    say_duration,
    say_mbit,
    say_rate,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("200MB", 200_000_000),
        ("1.5 GiB", 3 * 2**29),
        ("2kib", 2048),
        ("0", 0),
        ("7000000", 7_000_000),
    ],
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert read_bytes(text) == size


def test_rates_times_and_ratios_are_read_with_their_units() -> None:
    assert read_rate("1.5gbit") == 1.5e9
    assert read_seconds("20 ms") == pytest.approx(0.02)
    assert (say_rate(2.4e6), say_rate(None)) == ("2.4mbit", "")
    assert (read_ratio("1%"), read_ratio("0.5")) == (0.01, 0.5)


def test_quantity_with_an_unknown_unit_names_the_units() -> None:
    with pytest.raises(InvalidInputError, match="B, KB, MB, GB, KiB, MiB, GiB"):
        read_bytes("5 apples")
    for text in ("3", "2.5", "500000"):
        with pytest.raises(InvalidInputError, match=f"'{text}'"):
            read_bytes(text)
    with pytest.raises(InvalidInputError, match="bit, kbit, mbit, gbit"):
        read_rate("5")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-1, "0 s"), (59.4, "59 s"), (185, "3 min 5 s"), (671, "11 min"), (7805, "2 h 10 min")],
)
def test_durations_have_as_many_units_as_they_need(seconds: float, words: str) -> None:
    assert say_duration(seconds) == words


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-2, "0 s"), (59.9, "59 s"), (61, "1 min"), (7199, "1 h"), (86_400 * 12.9, "12 d")],
)
def test_age_is_written_in_its_largest_unit(seconds: float, text: str) -> None:
    assert say_age(seconds) == text


@pytest.mark.parametrize(
    ("bps", "said"),
    [
        (12.34e6, "12.3"),
        (1e9, "1000"),
        (4e3, "0.004"),
        (90.0, "0.00009"),
        (1.5e12, "1500000"),
        (0.0, "0"),
    ],
)
def test_rates_in_mbit_have_three_digits_and_no_exponent(bps: float, said: str) -> None:
    assert say_mbit(bps) == said
