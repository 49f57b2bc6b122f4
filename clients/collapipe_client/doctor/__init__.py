"""The examination that `collapipe doctor` runs. A "box" is a machine that runs one service.

Facts that few machines show are read by separate functions. So tests can judge them (`check_...`) on any machine.
"""

from collapipe_client.doctor.box_settings import BoxSettings, Role, read_box_settings
from collapipe_client.doctor.check import Check
from collapipe_client.doctor.examination import examine

__all__ = ["BoxSettings", "Check", "Role", "examine", "read_box_settings"]
