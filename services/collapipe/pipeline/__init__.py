"""The stage host: a range of units, run as one stage of a 1F1B pipeline. Knows torch, and no network."""

from collapipe.pipeline.bank import HeldUnit, UnitBank
from collapipe.pipeline.mailbox import Mailbox
from collapipe.pipeline.observer import StageObserver
from collapipe.pipeline.optimizer import clip_scale, learning_rate
from collapipe.pipeline.processor import EmulatedProcessor
from collapipe.pipeline.schedule import Action, ActionKind
from collapipe.pipeline.stage import Stage, StageContext, StepTimes

__all__ = [
    "Action",
    "ActionKind",
    "EmulatedProcessor",
    "HeldUnit",
    "Mailbox",
    "Stage",
    "StageContext",
    "StageObserver",
    "StepTimes",
    "UnitBank",
    "clip_scale",
    "learning_rate",
]
