"""Writes prometheus.tls.yml: prometheus.yml for services with mutual TLS. With `--check`, only tests whether it is current.

    python deploy/prometheus/build.py [--check]

Prometheus has no variables in its configuration, and reads the files of `tls_config` even if it scrapes by HTTP.
So a deployment needs either file, and this command keeps them alike.
"""

import argparse
import sys
from pathlib import Path

_FOLDER = Path(__file__).parent
_JOB = "  - job_name: collapipe\n"
_HEAD = "# prometheus.yml with mutual TLS, written by build.py. Change prometheus.yml and run it again.\n#\n"
_TLS = """\
    scheme: https
    # Services answer a certificate with the role prometheus. Their own ones must have the host of the target.
    # Prometheus reads these files again for new connections.
    tls_config:
      ca_file: /etc/collapipe/tls/ca.pem
      cert_file: /etc/collapipe/tls/cert.pem
      key_file: /etc/collapipe/tls/key.pem
"""


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="Writes prometheus.tls.yml.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if the file is not current"
    )
    check = parser.parse_args().check
    plain = (_FOLDER / "prometheus.yml").read_text(encoding="utf-8")
    before, job, after = plain.partition(_JOB)
    if not job:
        sys.exit(
            f"prometheus.yml has no line {_JOB.strip()!r}: add it, or change _JOB in {__file__}"
        )
    text = _HEAD + before + job + _TLS + after
    path = _FOLDER / "prometheus.tls.yml"
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    if check:
        sys.exit(f"{path.name} is not current after a change: run python {sys.argv[0]}")
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
