"""Reads compose files as docker-compose does: merges layers and uses the defaults of variables."""

import re
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = DEPLOY / "compose"
LAYERS = sorted(path.name for path in COMPOSE.glob("compose*.yaml"))
STANDALONE = {"compose.yaml", "compose.jetson.yaml"}

Service = dict[str, Any]


def load_layer(name: str) -> dict[str, Any]:
    """Reads one file; `${NAME:-default}` becomes the default."""
    text = (COMPOSE / name).read_text(encoding="utf-8")
    return yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))


def load_services(*layers: str) -> dict[str, Service]:
    """Returns the services of several layers: merges mappings, joins lists and replaces single values."""
    merged: dict[str, Service] = {}
    for layer in layers:
        for name, service in load_layer(layer)["services"].items():
            merged[name] = _merge(merged.get(name, {}), service)
    return merged


def _merge(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: _merge(old.get(key), value) for key, value in new.items()}}
    if isinstance(old, list) and isinstance(new, list):
        return [*old, *(item for item in new if item not in old)]
    return new
