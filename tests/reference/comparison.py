"""Finds where two sets of named tensors differ."""

from collections.abc import Mapping

import torch
from torch import Tensor


def first_difference(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> str | None:
    """Describes the first difference, in the order of `expected`. Returns `None` if all tensors are equal."""
    if expected.keys() != actual.keys():
        missing = sorted(expected.keys() - actual.keys())
        extra = sorted(actual.keys() - expected.keys())
        return f"names differ: missing {missing[:3]} of {len(missing)}, extra {extra[:3]} of {len(extra)}"
    different = [name for name in expected if not _equal(expected[name], actual[name])]
    if not different:
        return None
    name = different[0]
    a, b = expected[name], actual[name]
    where = f"{len(different)} of {len(expected)} tensors differ, the first is {name}: "
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{where}{tuple(a.shape)} {a.dtype} is expected, {tuple(b.shape)} {b.dtype} found"
    distance = (a.double() - b.double()).abs()
    return f"{where}{int((a != b).sum())} of {a.numel()} elements, by {distance.max():.3g} at most"


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)
