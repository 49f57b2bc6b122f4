"""Compares all locked versions, and those of torch, with the known vulnerabilities.

    python .ci/audit.py [OPTIONS OF PIP-AUDIT]

The exit status is 0 if all versions were audited and none is vulnerable, 1 if one is vulnerable, and otherwise 75.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

_NOT_DONE = 75
"""EX_TEMPFAIL of sysexits.h."""
_CHECKOUT = Path(__file__).parents[1]


def _locked_versions() -> dict[str, set[str]]:
    """Returns the versions of each package. Different Pythons and machines have different ones."""
    versions = defaultdict(set)
    for path in [*(_CHECKOUT / "requirements").glob("*.txt"), _CHECKOUT / "Makefile"]:
        text = path.read_text(encoding="utf-8")
        for name, version in re.findall(r"^(?:TORCH := )?([\w.-]+)==([^\s;]+)", text, re.MULTILINE):
            versions[name].add(version)
    return versions


def _audit(pins: list[str], options: list[str]) -> list[dict[str, Any]]:
    """Returns what pip-audit says of each package, or nothing if it reached no data."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(pins))
        file.flush()
        command = [
            "pip_audit",
            "--no-deps",
            "--disable-pip",
            "--format=json",
            "--progress-spinner=off",
        ]
        ran = subprocess.run(
            [sys.executable, "-m", *command, f"--requirement={file.name}", *options],
            capture_output=True,
            text=True,
            check=False,
        )
    if not ran.stdout:
        print("pip-audit:", (ran.stderr.splitlines() or ["it said nothing"])[-1])
        return []
    packages: list[dict[str, Any]] = json.loads(ran.stdout)["dependencies"]
    return packages


def main(options: list[str]) -> int:
    """Prints what is vulnerable, and returns the exit status."""
    left = {name: sorted(versions) for name, versions in _locked_versions().items()}
    wanted = sum(map(len, left.values()))
    found = []
    # pip-audit accepts one version of a package at a time.
    while pins := [f"{name}=={versions.pop()}" for name, versions in left.items() if versions]:
        found += _audit(pins, options)
    audited = [package for package in found if "vulns" in package]
    vulnerable = [package for package in audited if package["vulns"]]
    for package in vulnerable:
        ids = ", ".join(vulnerability["id"] for vulnerability in package["vulns"])
        print(f"{package['name']} {package['version']} is vulnerable: {ids}")
    print(
        f"{len(audited)} of {wanted} locked versions were audited, and {len(vulnerable)} are vulnerable."
    )
    if vulnerable:
        return 1
    if len(audited) < wanted:
        print(
            "NOT AUDITED: pip-audit reached no data about the other versions. Do not count this as passed."
        )
        return _NOT_DONE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
