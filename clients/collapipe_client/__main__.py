"""The command `collapipe`, also as `python -m collapipe_client`."""

import signal

from collapipe.installation import one_line_for_a_missing_package


def main() -> None:
    """Runs the command. Ctrl-C while its modules are imported ends it without a traceback."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # Otherwise it is ignored, as in the background.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    with one_line_for_a_missing_package("client"):
        from collapipe_client.cli import app

    signal.signal(signal.SIGINT, handler)
    app()


if __name__ == "__main__":
    main()
