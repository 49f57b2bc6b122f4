"""`python -m collapipe.control_unit`."""

from collapipe.control_unit.app import ControlUnitSettings, start
from collapipe.service_process import run_service

run_service("control-unit", ControlUnitSettings, start)
