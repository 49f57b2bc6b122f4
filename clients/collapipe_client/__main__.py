"""Makes `python -m collapipe_client` run the command `collapipe`."""

from collapipe_client.cli import app

app()
