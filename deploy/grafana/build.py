"""Writes dashboards/*.json from definitions/; `--check` only says whether they are current.

    python deploy/grafana/build.py [--check]

The JSON is committed: Grafana reads it as it is, and whoever deploys needs no Python. It is generated because five
dashboards are four thousand lines of which most say the same, and because Grafana's own library for it
(grafana-foundation-sdk, of the version of our Grafana) knows which fields there are.
"""

import argparse
import json
import sys
from pathlib import Path

from definitions import DASHBOARDS, build
from grafana_foundation_sdk.cog.encoder import JSONEncoder

DIRECTORY = Path(__file__).parent / "dashboards"

OF_INTERVALS = ("auto", "auto_count", "auto_min")
"""The library gives them to every variable; Grafana's schema has them for intervals only."""


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="Writes the JSON of the dashboards.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when one is old")
    check = parser.parse_args().check
    old = []
    for definition in DASHBOARDS:
        document = json.loads(json.dumps(build(definition, DASHBOARDS), cls=JSONEncoder))
        document["id"] = None  # Grafana gives one; a fixed one would overwrite another dashboard
        for variable in document["templating"]["list"]:
            for name in OF_INTERVALS:
                variable.pop(name, None)
        text = json.dumps(document, indent=1, sort_keys=True) + "\n"
        path = DIRECTORY / f"{definition.uid.removeprefix('collapipe-')}.json"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            old.append(path.name)
            if not check:
                path.write_text(text, encoding="utf-8")
    if check and old:
        sys.exit(f"{', '.join(old)} is not what definitions/ say: run python {sys.argv[0]}")


if __name__ == "__main__":
    main()
