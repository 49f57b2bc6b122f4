"""The dashboards use existing metrics and labels, explain every panel, and are current."""

import importlib.util
import json
import re
import runpy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from dashboard_panels import ROOT, Panel, documents, panels
from prometheus_client import REGISTRY

from collapipe.telemetry import metrics  # noqa: F401 (registers every metric)

RULES = ROOT / "deploy/prometheus/rules"
PANELS = list(panels())
QUERIES = [
    pytest.param(target.expression, id=f"{panel.name}/{number}")
    for panel in PANELS
    for number, target in enumerate(panel.targets)
]
OF_PROMETHEUS = {"up": set(), "ALERTS": {"alertname", "alertstate", "severity"}}
"""Series that Prometheus itself makes, with the labels that targets do not have."""
CHOSEN = {"type": "prometheus", "uid": "${data_source}"}
"""The data source that a person chooses at the top, so the dashboards need none with a certain uid."""
OF_TARGETS = {"job", "instance", "service", "host_role"}
_WORDS = {
    *("by", "without", "on", "ignoring", "group_left", "group_right", "offset", "bool"),
    *("and", "or", "unless"),
}
_CLAUSES = r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)"


def rules() -> Iterator[tuple[str, str]]:
    """Yields name and expression of every rule and alert."""
    for path in sorted(RULES.glob("*.yml")):
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            for rule in group["rules"]:
                yield rule.get("record") or rule["alert"], rule["expr"]


RULE_QUERIES = [pytest.param(expression, id=name) for name, expression in rules()]
ALERT_TEXTS = [
    pytest.param(rule, id=rule["alert"])
    for group in yaml.safe_load((RULES / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]


def exported() -> dict[str, set[str]]:
    """Returns every series that services export, with its labels."""
    found: dict[str, set[str]] = {}
    for collector in set(REGISTRY._collector_to_names):
        labels = set(getattr(collector, "_labelnames", ()))
        names = REGISTRY._collector_to_names[collector]
        for name in names:
            if not name.endswith("_created"):
                found[name] = labels | ({"le"} if name.endswith("_bucket") else set())
    return found


def recorded() -> dict[str, set[str]]:
    """Returns every series that a recording rule makes, with the labels that its outermost sums keep."""
    return {
        name: {
            word.strip()
            for clause in re.findall(r"\bby\s*\(([^)]*)\)", expression)
            for word in clause.split(",")
        }
        | {
            label
            for other, labels in RECORDED_LABELS.items()
            if other in expression
            for label in labels
        }
        for name, expression in rules()
        if ":" in name
    }


RECORDED_LABELS = {"stage:": {"cluster", "stage", "service", "host_role"}}
KNOWN = {**exported(), **recorded(), **OF_PROMETHEUS}


def bare(expression: str) -> str:
    """Removes strings, ranges and lists of labels; names, functions and operators remain."""
    text = re.sub(r'"[^"]*"', '""', expression)
    text = re.sub(_CLAUSES, " ", text)
    return re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", text)


def names_in(expression: str) -> set[str]:
    """Returns the series that an expression reads."""
    words = re.findall(r"(?<![\w:.$])([a-zA-Z_][\w:]*)(?!\s*\()(?![\w:])", bare(expression))
    return {word for word in words if word not in _WORDS}


def labels_in(expression: str) -> set[str]:
    """Returns the labels that an expression matches, groups by or joins on."""
    matched = {
        label
        for block in re.findall(r"\{([^}]*)\}", expression)
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", re.sub(r'"[^"]*"', '""', block))
    }
    listed = {
        label.strip() for clause in re.findall(_CLAUSES, expression) for label in clause.split(",")
    }
    return (matched | listed) - {""}


def made_in(expression: str) -> set[str]:
    """Returns the labels that an expression creates."""
    return set(re.findall(r'label_replace\([^"]*(?:\{[^}]*\})?[^"]*?"(\w+)", "\$1"', expression))


def test_series_and_labels_of_an_expression_are_found() -> None:
    expression = (
        'sum by (a, b) (rate(x_total{l=~"y", m!="z"}[$__rate_interval])) / on (c) group_left () '
        "(stage:x:rate1m > 0.5) and on (d) up"
    )
    assert names_in(expression) == {"x_total", "stage:x:rate1m", "up"}
    assert labels_in(expression) == {"a", "b", "l", "m", "c", "d"}


@pytest.mark.parametrize("expression", [*QUERIES, *RULE_QUERIES])
def test_every_metric_and_label_exists_in_the_code(expression: str) -> None:
    names = names_in(expression)
    assert names, "it reads no series"
    assert names <= KNOWN.keys(), names - KNOWN.keys()
    labels = OF_TARGETS | made_in(expression) | {label for name in names for label in KNOWN[name]}
    assert labels_in(expression) <= labels, labels_in(expression) - labels


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.name)
def test_legend_shows_labels_that_the_expression_keeps(panel: Panel) -> None:
    for target in panel.targets:
        shown = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", target.legend))
        kept = labels_in(target.expression)
        if not re.search(r"\bby\s*\(", target.expression):
            kept = kept.union(OF_TARGETS, *(KNOWN[name] for name in names_in(target.expression)))
        assert shown <= kept, shown - kept
        assert target.legend


@pytest.mark.parametrize("rule", ALERT_TEXTS)
def test_texts_of_alerts_use_labels_that_the_alert_has(rule: dict[str, Any]) -> None:
    names = names_in(rule["expr"])
    known = OF_TARGETS | made_in(rule["expr"]) | {label for name in names for label in KNOWN[name]}
    for text in rule["annotations"].values():
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= known


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.name)
def test_panel_has_a_unit_a_description_and_a_reason_for_no_data(panel: Panel) -> None:
    assert panel.document["fieldConfig"]["defaults"]["noValue"].startswith("no ")
    assert panel.unit
    assert len(panel.document["description"]) > 30
    assert panel.document["datasource"] == CHOSEN
    assert len(panel.targets) >= 1
    for target in panel.document["targets"]:
        assert target["datasource"] == CHOSEN


def test_rates_are_over_grafanas_interval_or_a_stated_one() -> None:
    for panel in PANELS:
        for target in panel.targets:
            ranges = set(re.findall(r"\[([^\]]+)\]", target.expression))
            assert ranges <= {"$__rate_interval", "5m", "10m"}, panel.name


@pytest.mark.parametrize("name", sorted(documents()))
def test_dashboard_can_be_provisioned(name: str) -> None:
    document = documents()[name]
    assert document["id"] is None
    assert document["uid"] == f"collapipe-{name.removesuffix('.json')}"
    assert "__inputs" not in document
    numbers = [panel["id"] for panel in document["panels"]]
    assert len(set(numbers)) == len(numbers)
    titles = [panel["title"] for panel in document["panels"]]
    assert len(set(titles)) == len(titles)
    choice, *variables = document["templating"]["list"]
    assert (choice["name"], choice["type"], choice["query"]) == (
        "data_source",
        "datasource",
        "prometheus",
    )
    assert [one["name"] for one in variables] == ["cluster", "member"]
    queries = [*variables, *document["annotations"]["list"]]
    assert all(query["datasource"] == CHOSEN for query in queries)
    others = {f"/d/{one['uid']}" for one in documents().values()} - {f"/d/{document['uid']}"}
    assert {link["url"] for link in document["links"]} == others


@pytest.mark.parametrize("name", sorted(documents()))
def test_dashboard_begins_with_what_holds_the_job_back(name: str) -> None:
    """The first row has two to four large figures, and no panel covers another."""
    first, *others = documents()[name]["panels"]
    answers = [panel for panel in others if panel["type"] == "stat"]
    assert first["type"] == "row"
    assert 2 <= len(answers) <= 4
    assert {panel["gridPos"]["y"] for panel in answers} == {1}
    taken: set[tuple[int, int]] = set()
    for panel in documents()[name]["panels"]:
        place = panel["gridPos"]
        x, y = place.get("x", 0), place.get("y", 0)
        cells = {(a, b) for a in range(x, x + place["w"]) for b in range(y, y + place["h"])}
        assert x + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_provisioning_names_a_prometheus_and_the_folder_that_compose_mounts() -> None:
    provisioning = ROOT / "deploy/grafana/provisioning"
    sources = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text("utf-8"))
    assert [one["type"] for one in sources["datasources"]] == [CHOSEN["type"]]
    providers = yaml.safe_load((provisioning / "dashboards/collapipe.yaml").read_text("utf-8"))
    compose = yaml.safe_load(
        (ROOT / "deploy/compose/compose.observability.yaml").read_text("utf-8")
    )
    mounted = [volume.split(":")[1] for volume in compose["services"]["grafana"]["volumes"]]
    assert providers["providers"][0]["options"]["path"] in mounted


@pytest.fixture
def _sdk() -> None:
    if importlib.util.find_spec("grafana_foundation_sdk") is None:
        pytest.skip("no grafana-foundation-sdk here: it needs Python 3.11 or newer")


@pytest.mark.usefixtures("_sdk")
def test_dashboards_are_what_their_definitions_make(monkeypatch: pytest.MonkeyPatch) -> None:
    program = str(ROOT / "deploy/grafana/build.py")
    monkeypatch.setattr(sys, "argv", [program, "--check"])
    monkeypatch.syspath_prepend(ROOT / "deploy/grafana")
    runpy.run_path(program, run_name="__main__")


def lost(before: Any, after: Any, where: str = "") -> list[str]:
    """Returns the paths of values that are lost or changed; added defaults are allowed."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [x for key in before for x in lost(before[key], after.get(key), f"{where}.{key}")]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [x for index, pair in pairs for x in lost(*pair, f"{where}[{index}]")]
    return [] if before == after else [where]


@pytest.mark.usefixtures("_sdk")
@pytest.mark.parametrize("name", sorted(documents()))
def test_types_of_grafana_know_every_field(name: str) -> None:
    """A field that the schema of Grafana does not know is lost when its types read and write a document."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    document = documents()[name]
    again = json.loads(json.dumps(Dashboard.from_json(document), cls=JSONEncoder))
    assert lost(document, {**again, "id": None}) == []
