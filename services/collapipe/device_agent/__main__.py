"""`python -m collapipe.device_agent`."""

from collapipe.installation import one_line_for_a_missing_package

with one_line_for_a_missing_package("device-agent"):
    from collapipe.device_agent.app import DeviceAgentSettings, start
    from collapipe.service_process import run_service

run_service("device-agent", DeviceAgentSettings, start)
