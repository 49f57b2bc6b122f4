"""Writes sizes for people."""


def say_bytes(number: float) -> str:
    """Writes a size with four digits, in the largest unit that it reaches: "1.234 GB", "60 MB" or "12 B"."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:.0f} B"
