"""Names the units of a model for people."""


def unit_words(start_unit: int, stop_unit: int, num_units: int) -> str:
    """Names a half-open range of units, for example "embedding, blocks 0-1"."""
    words = []
    if start_unit == 0 < stop_unit:
        words.append("embedding")
    # Unit 0 is the embedding and the last unit is the head, so unit i is block i - 1.
    first_block, last_block = max(start_unit, 1) - 1, min(stop_unit, num_units - 1) - 2
    if first_block == last_block:
        words.append(f"block {first_block}")
    elif first_block < last_block:
        words.append(f"blocks {first_block}-{last_block}")
    if start_unit < stop_unit == num_units:
        words.append("head")
    return ", ".join(words) or "nothing"
