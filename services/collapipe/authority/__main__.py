"""`python -m collapipe.authority`."""

from collapipe.installation import one_line_for_a_missing_package

with one_line_for_a_missing_package("client"):
    from collapipe.authority.app import AuthoritySettings, start
    from collapipe.service_process import run_service

run_service("authority", AuthoritySettings, start)
