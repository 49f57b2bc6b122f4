"""The dashboards against the types that Grafana's own frontend is compiled with: npm's @grafana/schema."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from dashboard_panels import documents

pytestmark = pytest.mark.heavy

PACKAGES = ("@grafana/schema@11.6.0", "typescript@5.5.4")
"""The schema of the Grafana in compose.observability.yaml."""
CHECKED = """
import type { Dashboard } from '@grafana/schema/dist/esm/raw/dashboard/x/dashboard_types.gen.d.ts';
import type { Options as Stat } from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen.d.ts';
import type { FieldConfig as Lines, Options as TimeSeries }
  from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen.d.ts';
import type { FieldConfig as States, Options as Timeline }
  from '@grafana/schema/dist/esm/raw/composable/statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen.d.ts';

// in JSON, an enum is its text; what is a literal here may not have a field that the type does not know
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
    """A folder with the types and a compiler."""
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
    """What the compiler complains about."""
    (folder / "dashboards.ts").write_text(source, encoding="utf-8")
    command = [str(folder / "node_modules/.bin/tsc"), "--project", "tsconfig.json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    return done.stdout + done.stderr


def source_of(dashboards: dict[str, dict[str, Any]]) -> str:
    """Every dashboard, and of every panel what the dashboard's type leaves open."""
    lines = [CHECKED]
    for document in dashboards.values():
        # the question of an annotation is its data source's, not the dashboard's
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
def test_what_grafana_does_not_know_is_found(compiler: Path, field: str, value: str) -> None:
    dashboards = documents()
    stat = next(p for p in dashboards["links.json"]["panels"] if p["type"] == "stat")
    stat["options"][field] = value
    assert "error TS" in compiled(compiler, source_of(dashboards))
