"""`python -m collapipe.scheduler`."""

from collapipe.scheduler.app import SchedulerSettings, start
from collapipe.service_process import run_service

run_service("scheduler", SchedulerSettings, start)
