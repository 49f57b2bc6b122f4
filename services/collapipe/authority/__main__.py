"""`python -m collapipe.authority`."""

from collapipe.authority.app import main

main()
