"""The checks of `collapipe doctor`. A "box" is a machine that runs one service.

Functions that read facts of special hardware are separate from those that judge the facts (`check_...`). So
tests can check the judgement on any machine.
"""

from collapipe_client.doctor.box_settings import BoxSettings as BoxSettings
from collapipe_client.doctor.box_settings import Role as Role
from collapipe_client.doctor.box_settings import read_box_settings as read_box_settings
from collapipe_client.doctor.check import Check as Check
from collapipe_client.doctor.examination import examine as examine
