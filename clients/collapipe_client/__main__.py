"""`python -m collapipe_client`."""

from collapipe_client.cli import app

app()
