"""Reads the compose files as docker-compose does, without it: layers merged, variables at their defaults."""

import re
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = DEPLOY / "compose"

Service = dict[str, Any]


def load_layer(name: str) -> dict[str, Any]:
    """One file; `${NAME:-default}` is its default."""
    text = (COMPOSE / name).read_text(encoding="utf-8")
    return yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))


def load_services(*layers: str) -> dict[str, Service]:
    """The services of some layers: mappings are merged, lists are joined, what is single is replaced."""
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
