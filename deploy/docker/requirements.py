"""Writes the requirements of pyproject.toml to files. Images install them before the project's code.

    python requirements.py pyproject.toml FOLDER

Each extra gets a file of its own. The file every.txt has the requirements without extras.
"""

import re
import sys
from pathlib import Path

import tomllib


def requirements(project: dict, extra: str) -> list[str]:
    """Returns the requirements of an extra, with the general ones and those of extras that it names."""
    needed = list(project["dependencies"])
    for line in project["optional-dependencies"].get(extra, []):
        own = re.fullmatch(r"collapipe\[([\w,]+)\]", line)
        needed += (
            [needs for name in own[1].split(",") for needs in requirements(project, name)]
            if own
            else [line]
        )
    return list(dict.fromkeys(needed))


if __name__ == "__main__":
    project = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["project"]
    for extra in ["every", *project["optional-dependencies"]]:
        text = "\n".join(requirements(project, extra))
        Path(sys.argv[2], f"{extra}.txt").write_text(f"{text}\n", encoding="utf-8")
