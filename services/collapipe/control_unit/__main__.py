"""`python -m collapipe.control_unit`."""

from collapipe.control_unit.app import main

main()
