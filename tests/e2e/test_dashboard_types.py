"""Checks the dashboards against the types of Grafana's own frontend, from the npm package @grafana/schema."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from dashboard_panels import documents

PACKAGES = ("@grafana/schema@11.6.0", "typescript@5.5.4")
"""The schema has the version of Grafana in compose.observability.yaml."""
CHECKED = """
import type { Dashboard } from '@grafana/schema/dist/esm/raw/dashboard/x/dashboard_types.gen.d.ts';
import type { Options as Stat } from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen.d.ts';
import type { FieldConfig as Lines, Options as TimeSeries }
  from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen.d.ts';
import type { FieldConfig as States, Options as Timeline }
  from '@grafana/schema/dist/esm/raw/composable/statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen.d.ts';

// JSON has the text of an enum value. The compiler rejects unknown fields, because the values are literals.
type Json<T> = T extends string ? `${T}` : T extends (infer U)[] ? Json<U>[]
  : T extends object ? { [K in keyof T]: Json<T[K]> } : T;
"""
KINDS = {"stat": ("Stat", None), "timeseries": ("TimeSeries", "Lines")}
KINDS["state-timeline"] = ("Timeline", "States")
CONFIG = {
    "compilerOptions": {
        "strict": True,
        "noEmit": True,
        "skipLibCheck": True,
        "module": "ESNext",
        "moduleResolution": "Bundler",
        "types": [],
    },
    "files": ["dashboards.ts"],
}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provides a folder with the types and a TypeScript compiler."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm on this machine: apt-get install npm")
    folder = tmp_path_factory.mktemp("types")
    (folder / "package.json").write_text("{}")
    (folder / "tsconfig.json").write_text(json.dumps(CONFIG))
    command = [npm, "install", "--no-audit", "--no-fund", "--silent", *PACKAGES]
    subprocess.run(command, cwd=folder, check=True, timeout=240)
    return folder


def compiled(folder: Path, source: str) -> str:
    """Returns the errors of the compiler."""
    (folder / "dashboards.ts").write_text(source, encoding="utf-8")
    command = [str(folder / "node_modules/.bin/tsc"), "--project", "tsconfig.json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    return done.stdout + done.stderr


def source_of(dashboards: dict[str, dict[str, Any]]) -> str:
    """Returns TypeScript that declares the type of every dashboard.

    The type of a dashboard leaves the options of its panels open, so these have declarations of their own.
    """
    lines = [CHECKED]
    for document in dashboards.values():
        # The query of an annotation belongs to its data source, so the dashboard's type lacks it.
        annotations = [
            {key: value for key, value in one.items() if key != "expr"}
            for one in document["annotations"]["list"]
        ]
        document = {**document, "annotations": {"list": annotations}}
        lines.append(f"const _: Json<Dashboard> = {json.dumps(document)};")
        for panel in document["panels"]:
            if panel["type"] == "row":
                continue
            options, custom = KINDS[panel["type"]]
            lines.append(f"const _: Json<{options}> = {json.dumps(panel['options'])};")
            if custom:
                found = panel["fieldConfig"]["defaults"]["custom"]
                lines.append(f"const _: Json<{custom}> = {json.dumps(found)};")
    return "\n".join(
        line.replace("const _:", f"export const value{number}:", 1)
        for number, line in enumerate(lines)
    )


def test_dashboards_have_grafanas_types(compiler: Path) -> None:
    assert compiled(compiler, source_of(documents())) == ""


@pytest.mark.parametrize(
    ("field", "value"),
    [("colorMode", "loud"), ("colour", "background"), ("wideLayout", "yes")],
)
def test_value_that_grafana_rejects_is_found(compiler: Path, field: str, value: str) -> None:
    dashboards = documents()
    stat = next(p for p in dashboards["links.json"]["panels"] if p["type"] == "stat")
    stat["options"][field] = value
    assert "error TS" in compiled(compiler, source_of(dashboards))
