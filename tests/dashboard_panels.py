"""Imports deploy/grafana/panels.py for tests; it is not part of an installed package."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "deploy/grafana"))

from panels import Panel, documents, panels, to_promql  # noqa: E402

__all__ = ["ROOT", "Panel", "documents", "panels", "to_promql"]
