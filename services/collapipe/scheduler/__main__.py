"""`python -m collapipe.scheduler`."""

from collapipe.installation import one_line_for_a_missing_package

with one_line_for_a_missing_package("scheduler"):
    from collapipe.scheduler.app import SchedulerSettings, start
    from collapipe.service_process import run_service

run_service("scheduler", SchedulerSettings, start)
