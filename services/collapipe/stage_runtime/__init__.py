"""Runs a range of units as one stage of a 1F1B pipeline. Knows torch, and no network.

`stage` runs the micro-batches, in the order of `action_order`. `mailbox` holds the frames that have arrived,
and `activation_stash` what is kept for backward passes. `resident_units` holds the units with their optimizer
states, and `optimizer` updates them. `block_profile` measures a block, and `emulated_processor` imitates a
slower processor.
"""

from collapipe.stage_runtime.emulated_processor import EmulatedProcessor
from collapipe.stage_runtime.mailbox import Mailbox
from collapipe.stage_runtime.optimizer import clip_scale, learning_rate
from collapipe.stage_runtime.resident_units import ResidentUnit, ResidentUnits
from collapipe.stage_runtime.stage import Stage, StageContext, StepTimes
from collapipe.stage_runtime.stage_observer import StageObserver

__all__ = [
    "EmulatedProcessor",
    "Mailbox",
    "ResidentUnit",
    "ResidentUnits",
    "Stage",
    "StageContext",
    "StageObserver",
    "StepTimes",
    "clip_scale",
    "learning_rate",
]
