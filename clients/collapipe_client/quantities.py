"""Reads and writes numbers of things, sizes, rates, times and ratios as people write them.

Every function that reads raises `InvalidInputError` for a text that is not such a quantity.
"""

import re
from collections.abc import Mapping

from collapipe.errors import InvalidInputError

_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_MOST_BYTES = 1e18
"""What no device reaches, and what every message can carry."""
_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_RATIOS = {"%": 0.01, "": 1.0}
_LEAST_WITHOUT_UNIT = 1e6
"""A smaller number of bytes is probably one of MB or GB."""


def read_bytes(text: str) -> int:
    """Reads a size in bytes, for example "200MB", "1.5 GiB" or "0"."""
    size = _read(text, {**_BYTES, "": 1}, "a size", "200MB")
    if text.strip()[-1].isdigit() and 0 < size < _LEAST_WITHOUT_UNIT:
        raise InvalidInputError(
            f"{text!r} is {size:.0f} bytes: give it a unit, for example 3GB or 300MB"
        )
    if size and not 1 <= size <= _MOST_BYTES:
        raise InvalidInputError(
            f"{text!r} is {size:.3g} bytes: give at least 1 byte and at most {_MOST_BYTES:.3g}, or 0 for no limit"
        )
    return int(size)


def read_rate(text: str) -> float:
    """Reads a rate in bit/s, for example "10mbit", "10 Mbit/s" or "1.5 gbit"."""
    return _read(text.strip().removesuffix("/s"), _RATES, "a rate", "10mbit")


def read_seconds(text: str) -> float:
    """Reads a time in seconds, for example "20ms", "1.5s" or "300us"."""
    return _read(text, _SECONDS, "a time", "20ms")


def read_ratio(text: str) -> float:
    """Reads a ratio, for example "1%" or "0.01"."""
    return _read(text, _RATIOS, "a ratio", "1%")


def count(number: int, thing: str) -> str:
    """Writes a number of things: "1 row" or "2,000 rows"."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def say_rate(rate_bps: float | None) -> str:
    """Writes a rate; "" for `None`."""
    if rate_bps is None:
        return ""
    unit = next((unit for unit in ("gbit", "mbit", "kbit") if rate_bps >= _RATES[unit]), "bit")
    return f"{rate_bps / _RATES[unit]:g}{unit}"


def say_mbit(rate_bps: float) -> str:
    """Writes a rate in Mbit/s with three digits, without its unit."""
    return f"{float(f'{rate_bps / 1e6:.3g}'):.6f}".rstrip("0").rstrip(".")


def say_seconds(seconds: float) -> str:
    """Writes a time; "" for 0."""
    return f"{1e3 * seconds:g}ms" if seconds else ""


def say_age(seconds: float) -> str:
    """Writes a time that has passed, in its largest unit: "3 d", "5 h", "12 min" or "40 s"."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(0.0, seconds) // 1:.0f} s"


def say_duration(seconds: float) -> str:
    """Writes a duration with one or two units: "42 s", "3 min 5 s", "12 min", "2 h 10 min" or "3 days"."""
    whole = round(max(seconds, 0.0))
    if whole < 60:
        return f"{whole} s"
    if whole < 600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole / 86_400:.0f} days"


def say_ratio(ratio: float) -> str:
    """Writes a ratio; "" for 0."""
    return f"{100 * ratio:g}%" if ratio else ""


def _read(text: str, units: Mapping[str, float], kind: str, example: str) -> float:
    factors = {unit.lower(): factor for unit, factor in units.items()}
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z%]*)", text.strip().lower())
    if match is None or match[2] not in factors:
        known = ", ".join(unit for unit in units if unit)
        raise InvalidInputError(
            f"{text!r} is not {kind}: give a number with {known}, for example {example}"
        )
    return float(match[1]) * factors[match[2]]
