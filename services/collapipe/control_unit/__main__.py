"""`python -m collapipe.control_unit`."""

from collapipe.installation import one_line_for_a_missing_package

with one_line_for_a_missing_package("control-unit"):
    from collapipe.control_unit.app import ControlUnitSettings, start
    from collapipe.service_process import run_service

run_service("control-unit", ControlUnitSettings, start)
