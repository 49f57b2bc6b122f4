"""`python -m collapipe.scheduler`."""

from collapipe.scheduler.app import main

main()
