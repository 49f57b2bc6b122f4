"""Rates, times and ratios as people write them."""

import re

from collapipe.errors import InvalidInputError

_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def read_rate(text: str) -> float:
    """Reads a rate into bit/s: "10mbit", "500 kbit", "1.5gbit"; raises `InvalidInputError`."""
    return _read(text, _RATES, "a rate", "10mbit")


def read_seconds(text: str) -> float:
    """Reads a time: "20ms", "1.5s", "300us"; raises `InvalidInputError`."""
    return _read(text, _SECONDS, "a time", "20ms")


def read_ratio(text: str) -> float:
    """Reads a ratio: "1%" or "0.01"; raises `InvalidInputError`."""
    return _read(text, {"%": 0.01, "": 1.0}, "a ratio", "1%")


def say_rate(rate_bps: float | None) -> str:
    """Writes a rate; "" where there is none."""
    if rate_bps is None:
        return ""
    unit = next((u for u in ("gbit", "mbit", "kbit") if rate_bps >= _RATES[u]), "bit")
    return f"{rate_bps / _RATES[unit]:g}{unit}"


def say_seconds(seconds: float) -> str:
    """Writes a time; "" for 0."""
    return f"{1e3 * seconds:g}ms" if seconds else ""


def say_ratio(ratio: float) -> str:
    """Writes a ratio; "" for 0."""
    return f"{100 * ratio:g}%" if ratio else ""


def _read(text: str, units: dict[str, float], what: str, example: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z%]*)", text.strip().lower())
    if match is None or match[2] not in units:
        known = ", ".join(unit for unit in units if unit)
        raise InvalidInputError(
            f"{text!r} is not {what}: give a number with {known}, for example {example}"
        )
    return float(match[1]) * units[match[2]]
