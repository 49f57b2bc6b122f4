"""`python -m collapipe.edge_server`."""

from collapipe.edge_server.app import main

main()
