"""`collapipe doctor`: looks at this machine before a job has to.

Each module finds facts and judges them apart: what a fact means is tested without the machine that has it.
"""

from collapipe_client.doctor.box_settings import BoxSettings, Role, read_box_settings
from collapipe_client.doctor.check import Check
from collapipe_client.doctor.examination import SchedulerToReach, examine

__all__ = [
    "BoxSettings",
    "Check",
    "Role",
    "SchedulerToReach",
    "examine",
    "read_box_settings",
]
