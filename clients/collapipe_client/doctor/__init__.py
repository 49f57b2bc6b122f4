"""The examination that `collapipe doctor` runs. A "box" is a machine that runs one service.

Functions that read rare facts are separate from those that judge them (`check_...`), so that tests can judge such
facts on any machine.
"""

from collapipe_client.doctor.box_settings import BoxSettings, Role, read_box_settings
from collapipe_client.doctor.check import Check
from collapipe_client.doctor.examination import examine

__all__ = ["BoxSettings", "Check", "Role", "examine", "read_box_settings"]
