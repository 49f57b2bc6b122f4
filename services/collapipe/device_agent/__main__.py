"""`python -m collapipe.device_agent`."""

from collapipe.device_agent.app import main

main()
