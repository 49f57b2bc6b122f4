"""The examination that `collapipe doctor` runs.

The modules separate two steps: some functions read facts from the machine, others (`check_...`) judge them. So the
judgements can be tested on any machine. A "box" is a machine that runs one service.
"""

from collapipe_client.doctor.box_settings import BoxSettings, Role, read_box_settings
from collapipe_client.doctor.check import Check
from collapipe_client.doctor.examination import examine

__all__ = ["BoxSettings", "Check", "Role", "examine", "read_box_settings"]
