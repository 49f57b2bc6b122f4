"""Writes sizes for people."""


def say_bytes(number: float) -> str:
    """Writes a size with four digits, in its largest unit: "1.234 GB", "60 MB" or "12 B"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:.0f} B"
