"""The command `collapipe`, also as `python -m collapipe_client`."""

from collapipe.installation import one_line_for_a_missing_package


def main() -> None:
    """Runs the command."""
    with one_line_for_a_missing_package("client"):
        from collapipe_client.cli import app

    app()


if __name__ == "__main__":
    main()
