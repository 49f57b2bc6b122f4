"""The mathematics of placement: numpy at most. No network, no torch, no clock, no files."""

from collapipe.allocation.placement import (
    BlockCost,
    Device,
    PlacedSegment,
    Placement,
    PlacementProblem,
    Segment,
)
from collapipe.allocation.strategies import strategy_for

__all__ = [
    "BlockCost",
    "Device",
    "PlacedSegment",
    "Placement",
    "PlacementProblem",
    "Segment",
    "strategy_for",
]
