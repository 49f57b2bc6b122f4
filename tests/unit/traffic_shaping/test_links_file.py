import json
from pathlib import Path
from typing import Any

import pytest

from collapipe.emulation.network_profiles import LinkConditions, network_profile
from collapipe.errors import InvalidInputError
from collapipe.traffic_shaping.shaper_process.links_file import LinksFile, combine
from collapipe.traffic_shaping.shaper_process.traces import named_trace

HOSTS = ["a", "b", "c"]


def make_file(links: dict[str, Any]) -> LinksFile:
    return LinksFile.model_validate({"hosts": HOSTS, "links": links})


def conditions(file: LinksFile, sender: str, receiver: str) -> LinkConditions:
    parts = file.links_from(sender)[receiver]
    return combine(entry.conditions_at(0) for entry in parts.values())


def test_entry_of_the_link_itself_counts_before_all_others() -> None:
    file = make_file({"a>b": {"rate_bps": 1e6}, "a>*": {"rate_bps": 2e6}, "*": {"rate_bps": 4e6}})
    rates = [conditions(file, "a", receiver).rate_bps for receiver in ("b", "c")]
    assert rates == [1e6, 2e6]
    assert list(file.links_from("a")["b"]) == ["a>b"]
    file = make_file({"a>*": {"profile": "wifi"}, "a>b": {}})  # The empty entry makes one ideal.
    assert [conditions(file, "a", receiver).is_ideal for receiver in ("b", "c")] == [True, False]
    assert file.links_from("b") == {}


def test_link_of_two_parts_has_the_lower_rate_and_the_sum_of_the_delays() -> None:
    file = make_file(
        {
            "a>*": {"profile": "wifi"},
            "*>b": {"profile": "lte-lossy", "direction": "down"},
            "*": {"profile": "lan"},
        }
    )
    link = conditions(file, "a", "b")
    wifi, lte = network_profile("wifi").up, network_profile("lte-lossy").down
    assert link.rate_bps == lte.rate_bps
    assert link.queue_seconds == lte.queue_seconds
    assert link.delay_seconds == pytest.approx(wifi.delay_seconds + lte.delay_seconds)
    assert link.loss_ratio == pytest.approx(lte.loss_ratio)
    assert conditions(file, "a", "c") == wifi
    assert conditions(file, "c", "a") == network_profile("lan").up


def test_value_beside_a_profile_counts() -> None:
    entry = make_file({"a>b": {"profile": "wifi", "loss_ratio": 0.05}}).links["a>b"]
    wifi = network_profile("wifi").up
    assert entry.conditions_at(0) == wifi.model_copy(update={"loss_ratio": 0.05})


def test_host_that_only_a_key_names_is_a_host_too() -> None:
    file = make_file({"a>z": {"rate_bps": 1e6}, "b>*": {"rate_bps": 2e6}})
    assert file.all_hosts == ["a", "b", "c", "z"]
    assert set(file.links_from("b")) == {"a", "c", "z"}


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ({"a-b": {"profile": "wifi"}}, "'a-b' .*sender>receiver"),
        ({"a>b": {"profile": "5g"}}, "profile '5g'"),
        ({"a>b": {"jitter_seconds": 0.01}}, "jitter .*0.01 s .* 0 s"),
        ({"a>b": {"loss_ratio": 1.5}}, "loss_ratio.*0.9999"),
        ({"a>b": {"rate_bps": 999}}, "rate_bps.* 999.* 1000"),
        ({"a>b": {"delay_seconds": 61}}, "delay_seconds.* 61"),
        ({"a>b": {"trace": {"steps": [{"at_seconds": 0, "rate_bps": 9}]}}}, "rate_bps.* 9"),
        ({"a>b": {"trace": "walk-away", "rate_bps": 1e6}}, "trace .*rate_bps"),
        ({"a>b": {"trace": "nowhere"}}, "'nowhere'.*walk-away"),
        ({"a>b": {"speed": 3}}, "speed"),
    ],
)
def test_mistake_in_links_is_refused_with_its_description(
    tmp_path: Path, links: dict[str, Any], message: str
) -> None:
    path = tmp_path / "links.json"
    path.write_text(json.dumps({"links": links}))
    with pytest.raises(InvalidInputError, match=message):
        LinksFile.read(path)


def test_initial_file_counts_until_links_json_exists(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    assert LinksFile.read(path) == LinksFile()
    (tmp_path / "initial.json").write_text('{"links": {"*": {"profile": "4g"}}}')
    assert LinksFile.read(path).links["*"].profile == "4g"
    path.write_text('{"links": {}}')
    assert LinksFile.read(path) == LinksFile()


def test_written_file_has_the_same_content_and_digest_when_it_is_read(tmp_path: Path) -> None:
    steps = [{"at_seconds": 0, "rate_bps": 1e6}, {"at_seconds": 2.5, "profile": "4g"}]
    file = make_file(
        {
            "a>b": {"profile": "wifi", "direction": "down", "loss_ratio": 0.1},
            "*": {"trace": {"steps": steps}, "started_at": 12.5},
        }
    )
    (tmp_path / "links.json").write_text(file.text)
    assert LinksFile.read(tmp_path / "links.json") == file
    assert LinksFile.read(tmp_path / "links.json").digest == file.digest
    assert make_file({}).digest != file.digest


def test_trace_gives_the_conditions_of_its_last_begun_step() -> None:
    links = {"a>b": {"trace": "walk-away", "started_at": 1000.0}}
    link = make_file(links).links["a>b"]
    steps = named_trace("walk-away").steps
    assert link.conditions_at(990.0) == link.conditions_at(1000.0) == network_profile("wifi").up
    assert link.next_change(1000.0) == 1000.0 + steps[1].at_seconds
    assert link.conditions_at(1020.0) == network_profile("4g").up
    assert link.conditions_at(1e6) == network_profile("wifi").up
    assert link.next_change(1e6) is None


def test_initial_file_of_the_compose_testbed_describes_every_host_in_both_directions() -> None:
    file = LinksFile.read(Path(__file__).parents[3] / "deploy/netem/state/initial.json")
    assert len(file.hosts) == 10
    for host in file.hosts:
        assert {f"{host}>*", f"*>{host}"} <= set(file.links)
        assert file.links[f"*>{host}"].direction == "down"
        assert set(file.links_from(host)) == set(file.hosts) - {host}


def test_conditions_of_two_parts_together_stay_within_the_limits() -> None:
    part = {"delay_seconds": 40.0, "jitter_seconds": 40.0, "loss_ratio": 0.9999}
    link = conditions(make_file({"a>*": part, "*>b": part}), "a", "b")
    assert (link.delay_seconds, link.jitter_seconds, link.loss_ratio) == (60.0, 60.0, 0.9999)
