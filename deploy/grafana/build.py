"""Writes dashboards/*.json from definitions/. With `--check`, only tests whether the files are current.

    python deploy/grafana/build.py [--check]

The JSON is committed, so that Grafana can read it and a deployment needs no Python. It is generated, because
five dashboards have four thousand lines which mostly repeat each other. Grafana's own library
(grafana-foundation-sdk, in the version of our Grafana) knows which fields exist.
"""

import argparse
import json
import sys
from pathlib import Path

from definitions import DASHBOARDS, build
from grafana_foundation_sdk.cog.encoder import JSONEncoder

DIRECTORY = Path(__file__).parent / "dashboards"

OF_INTERVALS = ("auto", "auto_count", "auto_min")
"""Fields that the library writes for every variable, but that Grafana allows for intervals only."""


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="Writes the JSON of the dashboards.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a file is not current"
    )
    check = parser.parse_args().check
    outdated = []
    for definition in DASHBOARDS:
        document = json.loads(json.dumps(build(definition, DASHBOARDS), cls=JSONEncoder))
        document["id"] = None  # Grafana assigns one; a fixed id could overwrite another dashboard
        for variable in document["templating"]["list"]:
            for name in OF_INTERVALS:
                variable.pop(name, None)
        text = json.dumps(document, indent=1, sort_keys=True) + "\n"
        path = DIRECTORY / f"{definition.uid.removeprefix('collapipe-')}.json"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            outdated.append(path.name)
            if not check:
                path.write_text(text, encoding="utf-8")
    if check and outdated:
        sys.exit(
            f"{', '.join(outdated)}: not current after a change in definitions/; run python {sys.argv[0]}"
        )


if __name__ == "__main__":
    main()
