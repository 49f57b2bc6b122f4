"""The definitions of all dashboards."""

from definitions.devices import DEVICES
from definitions.elements import build
from definitions.links import LINKS
from definitions.pipeline import PIPELINE
from definitions.scheduler import SCHEDULER
from definitions.training import TRAINING

DASHBOARDS = (TRAINING, PIPELINE, LINKS, DEVICES, SCHEDULER)

__all__ = ["DASHBOARDS", "build"]
