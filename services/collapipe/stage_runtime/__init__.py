"""Runs a range of units as one stage of a 1F1B pipeline. It uses torch, but no network."""

from collapipe.stage_runtime.emulated_processor import EmulatedProcessor
from collapipe.stage_runtime.mailbox import Mailbox
from collapipe.stage_runtime.optimizer import clip_scale
from collapipe.stage_runtime.resident_units import ResidentUnit, ResidentUnits
from collapipe.stage_runtime.stage import Stage, StageContext
from collapipe.stage_runtime.stage_observer import StageObserver

__all__ = [
    "EmulatedProcessor",
    "Mailbox",
    "ResidentUnit",
    "ResidentUnits",
    "Stage",
    "StageContext",
    "StageObserver",
    "clip_scale",
]
