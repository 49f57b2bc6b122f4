import json
from pathlib import Path
from typing import Any

import pytest

from collapipe.errors import InvalidInputError
from collapipe.traffic_shaping.netem.profiles import network_profile, network_profiles
from collapipe.traffic_shaping.netem.shaping import LinkKey, Shaping, read_shaping
from collapipe.traffic_shaping.netem.traces import named_trace, read_trace, trace_names

HOSTS = ["a", "b", "c"]


def shaping(links: dict[str, Any]) -> Shaping:
    return Shaping.model_validate({"hosts": HOSTS, "links": links})


def test_every_profile_says_what_it_is_and_where_its_figures_come_from() -> None:
    assert list(network_profiles()) == [
        *("lan", "wifi", "wifi-congested", "4g", "lte-lossy", "satellite"),
    ]
    for profile in network_profiles().values():
        assert len(profile.source) > 60 and profile.description
        assert profile.up.rate_bps and profile.down.rate_bps


def test_unknown_profile_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InvalidInputError, match=r"no network profile '5g': use one of lan, wifi"):
        network_profile("5g")


def test_links_own_key_counts_before_all_others() -> None:
    ways = shaping(
        {"a>b": {"rate_bps": 1e6}, "a>*": {"rate_bps": 2e6}, "*": {"rate_bps": 4e6}}
    ).from_host("a")
    assert {to: way.conditions(0).rate_bps for to, way in ways.items()} == {"b": 1e6, "c": 2e6}
    assert list(ways["b"].shapes) == ["a>b"]


def test_way_between_two_networks_is_as_slow_as_the_slower_and_as_long_as_both() -> None:
    world = shaping(
        {
            "a>*": {"profile": "wifi"},
            "*>b": {"profile": "lte-lossy", "direction": "down"},
            "*": {"profile": "lan"},
        }
    )
    way = world.from_host("a")["b"].conditions(0)
    wifi, lte = network_profile("wifi").up, network_profile("lte-lossy").down
    assert way.rate_bps == lte.rate_bps
    assert way.queue_seconds == lte.queue_seconds
    assert way.delay_seconds == pytest.approx(wifi.delay_seconds + lte.delay_seconds)
    assert way.loss_ratio == pytest.approx(lte.loss_ratio)
    assert world.from_host("a")["c"].conditions(0) == wifi
    assert world.from_host("c")["a"].conditions(0) == network_profile("lan").up


def test_link_without_a_key_is_not_shaped_and_an_empty_entry_frees_one() -> None:
    world = shaping({"a>*": {"profile": "wifi"}, "a>b": {}})
    assert world.from_host("a")["b"].conditions(0).free
    assert not world.from_host("a")["c"].conditions(0).free
    assert world.from_host("b") == {}


def test_value_beside_a_profile_counts() -> None:
    conditions = (
        shaping({"a>b": {"profile": "wifi", "loss_ratio": 0.05}}).links["a>b"].conditions(0)
    )
    assert conditions.loss_ratio == 0.05
    assert conditions.rate_bps == network_profile("wifi").up.rate_bps


def test_host_that_only_a_link_names_is_a_host_too() -> None:
    world = shaping({"a>z": {"rate_bps": 1e6}, "b>*": {"rate_bps": 2e6}})
    assert world.all_hosts == ["a", "b", "c", "z"]
    assert set(world.from_host("b")) == {"a", "c", "z"}


@pytest.mark.parametrize(
    ("links", "said"),
    [
        ({"a-b": {"profile": "wifi"}}, r"'a-b' is no link: give sender>receiver"),
        ({"a>b": {"profile": "5g"}}, r"no network profile '5g'"),
        ({"a>b": {"jitter_seconds": 0.01}}, r"jitter of 0.01 s is more than the delay of 0 s"),
        ({"a>b": {"loss_ratio": 1.5}}, r"loss_ratio.*less than or equal to 0.9999"),
        ({"a>b": {"trace": "walk-away", "rate_bps": 1e6}}, r"a trace or rate_bps, not both"),
        ({"a>b": {"trace": "nowhere"}}, r"no trace 'nowhere': use one of walk-away"),
        ({"a>b": {"speed": 3}}, r"speed.*not permitted"),
    ],
)
def test_mistake_in_links_is_refused_with_what_is_wrong(
    tmp_path: Path, links: dict[str, Any], said: str
) -> None:
    file = tmp_path / "links.json"
    file.write_text(json.dumps({"links": links}))
    with pytest.raises(InvalidInputError, match=said):
        read_shaping(file)


def test_initial_state_counts_until_there_is_another(tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    assert read_shaping(file).shaping == Shaping()
    (tmp_path / "initial.json").write_text('{"links": {"*": {"profile": "4g"}}}')
    assert read_shaping(file).shaping.links["*"].profile == "4g"
    file.write_text('{"links": {}}')
    assert read_shaping(file).shaping == Shaping()


def test_key_is_written_as_it_is_read() -> None:
    for text in ("a>b", "a>*", "*>b", "*"):
        assert str(LinkKey.parse(text)) == text
    assert str(LinkKey.parse("*>*")) == "*"
    assert str(LinkKey.parse("a>*").reverse) == "*>a"


def test_trace_is_what_its_last_begun_step_says() -> None:
    links = {"a>b": {"trace": "walk-away", "started_at": 1000.0}}
    way = shaping(links).from_host("a")["b"]
    steps = named_trace("walk-away").steps
    assert way.conditions(990.0) == way.conditions(1000.0) == network_profile("wifi").up
    assert way.next_change(1000.0) == 1000.0 + steps[1].at_seconds
    assert way.conditions(1020.0) == network_profile("4g").up
    assert way.conditions(1e6) == network_profile("wifi").up
    assert way.next_change(1e6) is None


def test_trace_of_the_package_goes_away_and_comes_back() -> None:
    assert trace_names() == ["walk-away"]
    rates = [step.in_direction("up").rate_bps or 0 for step in named_trace("walk-away").steps]
    assert rates[0] == rates[-1] == max(rates) > 5 * min(rates)


def test_csv_and_toml_say_the_same_trace(tmp_path: Path) -> None:
    table, toml = tmp_path / "steps.csv", tmp_path / "steps.toml"
    table.write_text("# a comment\nat_seconds,rate_bps,profile\n0,1e6,\n5,,4g\n")
    toml.write_text('steps = [{at_seconds = 0, rate_bps = 1e6}, {at_seconds = 5, profile = "4g"}]')
    assert read_trace(table) == read_trace(toml)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("x.toml", "steps = []", "steps: .*at least 1"),
        ("x.toml", "steps = [{at_seconds = 3}]", "are 3: they begin with 0"),
        ("x.csv", "at_seconds,rate_bps\n0,1e6\n5,2e6\n5,3e6\n", "are 0, 5, 5: .* and grow"),
        ("x.csv", "at_seconds,rate_bps\n0,fast\n", "rate_bps: .*valid number"),
        ("x.toml", "steps = ", "no trace"),
    ],
)
def test_file_that_is_no_trace_is_refused_with_what_is_wrong(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(InvalidInputError, match=said):
        read_trace(file)


def test_state_of_the_compose_testbed_gives_every_host_a_network_in_both_directions() -> None:
    file = Path(__file__).parents[3] / "deploy/netem/state/initial.json"
    world = read_shaping(file).shaping
    assert len(world.hosts) == 10
    for host in world.hosts:
        assert {f"{host}>*", f"*>{host}"} <= set(world.links)
        assert world.links[f"*>{host}"].direction == "down"
        assert set(world.from_host(host)) == set(world.hosts) - {host}


def test_parts_that_are_too_much_together_are_what_a_link_can_be_at_most() -> None:
    part = {"delay_seconds": 40.0, "jitter_seconds": 40.0, "loss_ratio": 0.9999}
    way = shaping({"a>*": part, "*>b": part}).from_host("a")["b"].conditions(0)
    assert (way.delay_seconds, way.jitter_seconds, way.loss_ratio) == (60.0, 60.0, 0.9999)
