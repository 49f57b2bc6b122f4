"""`python -m collapipe.device_agent`."""

from collapipe.device_agent.app import DeviceAgentSettings, start
from collapipe.service_process import run_service

run_service("device-agent", DeviceAgentSettings, start)
