"""`python -m collapipe.authority`."""

from collapipe.authority.app import AuthoritySettings, start
from collapipe.service_process import run_service

run_service("authority", AuthoritySettings, start)
