"""`python -m collapipe.edge_server`."""

from collapipe.edge_server.app import EdgeServerSettings, start
from collapipe.service_process import run_service

run_service("edge-server", EdgeServerSettings, start)
