"""`python -m collapipe.edge_server`."""

from collapipe.installation import one_line_for_a_missing_package

with one_line_for_a_missing_package("edge-server"):
    from collapipe.edge_server.app import EdgeServerSettings, start
    from collapipe.service_process import run_service

run_service("edge-server", EdgeServerSettings, start)
