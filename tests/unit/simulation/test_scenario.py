from pathlib import Path
from typing import Any

import pytest

from collapipe.errors import InvalidInputError
from collapipe.simulation import read_scenario
from collapipe_client.scenario_files import read_scenario_file

from .scenarios import RADIO, document, scenario

_READY = Path(__file__).parents[3] / "clients/experiments/scenarios"


def _sweep(parameter: str, *values: float) -> dict[str, Any]:
    return {"sweep": {"parameter": parameter, "values": list(values)}}


def _devices(*devices: dict[str, Any]) -> dict[str, Any]:
    return {"clusters": [{"devices": list(devices)}]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"round": 3}, "tiny.toml: .*'round'.*'rounds'"),
        ({"rounds": 0}, r"rounds = 0: .*\b1\b"),
        ({"seeds": 0}, r"seeds is 0: .*\b1\b"),
        ({"seeds": [3, -1]}, r"seed .*\b0\b"),
        ({"strategies": []}, "strategies"),
        ({"strategies": ["magic"]}, "strategies.0 = 'magic'"),
        ({"model": {"name": "gpt"}}, "model.name = 'gpt'.*'bert-base'"),
        ({"clusters": []}, "clusters"),
        (_devices(), "devices"),
        (_devices({}), "profile.*gigaflops"),
        (_devices({"profile": "abacus"}), "'abacus'"),
        (_devices({"profil": "laptop"}), "'profile'"),
        (
            _devices({"gigaflops": 1, "battery_joules": 9, "energy_budget_joules": 3}),
            "battery_joules = 9.*joules = 3",
        ),
        ({"control_unit": {"gigaflops": -1.0}}, "control_unit.gigaflops = -1.0"),
        ({"channel": {"kind": "pigeon"}}, "channel"),
        ({"channel": RADIO | {"bandwidth": 3}}, "'bandwidth_hz'"),
        ({"channel": RADIO | {"rate_bps": 3}}, "'channel.radio.rate_bps'"),
        ({"channel": {"kind": "wire", "rate_bps": float("nan")}}, "rate_bps"),
        ({"training": {"mini_batch": 8, "micro_batches": [3, 4]}}, r"\[3\].* 8: .*\[1, 2, 4, 8\]"),
        (_sweep("speed", 1), "sweep.parameter"),
        (_sweep("bandwidth"), "sweep.values"),
        (_sweep("bandwidth", 0), "sweep.values.* 0"),
        (_sweep("heterogeneity", 0.5), "sweep.values.* 0.5"),
        (_sweep("devices_per_cluster", 0), "sweep.values.* 0"),
        (_sweep("devices_per_cluster", 1.5), r"1\.5.*devices"),
        (_sweep("clusters", 1.5), r"1\.5.*clusters"),
        ({"world": {"absence": 0.6}}, "absence is 0.6.* = 1: .*0.5"),
    ],
)
def test_bad_scenario_says_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        read_scenario(document(**changes), "tiny.toml")


def test_all_mistakes_are_reported_together() -> None:
    given = document(rounds=0, seed=1)
    del given["channel"]
    with pytest.raises(InvalidInputError, match="'channel'") as caught:
        read_scenario(given, "tiny.toml")
    assert len(str(caught.value).splitlines()) == 3


def test_micro_batches_default_to_every_divisor() -> None:
    options = scenario(training={"mini_batch": 12}).training.micro_batch_options
    assert options == (1, 2, 3, 4, 6, 12)


def test_sweep_makes_one_scenario_a_value() -> None:
    points = scenario(**_sweep("penalty_weight", 1, 10)).points()
    found = [(value, point.schedule.penalty_weight, point.sweep) for value, point in points]
    assert found == [(1, 1, None), (10, 10, None)]
    assert [value for value, _ in scenario().points()] == [None]


def test_sweep_of_devices_or_clusters_repeats_the_list() -> None:
    swept = scenario(**_sweep("devices_per_cluster", 1, 3)).points()
    speeds = [[device.gigaflops for device in point.clusters[0].devices] for _, point in swept]
    assert speeds == [[40.0], [40.0, 10.0, 40.0]]
    kinds = _devices({"gigaflops": 40.0})["clusters"] + _devices({"gigaflops": 10.0})["clusters"]
    kinds[0]["count"] = 2
    speeds = [
        [cluster.devices[0].gigaflops for cluster in point.clusters for _ in range(cluster.count)]
        for _, point in scenario(clusters=kinds, **_sweep("clusters", 1, 4)).points()
    ]
    assert speeds == [[40.0], [40.0, 40.0, 10.0, 40.0]]


def test_sweep_of_bandwidth_or_budgets_sets_the_channel_or_every_device() -> None:
    sweep = _sweep("bandwidth", 5e6)
    ((_, wire),) = scenario(**sweep).points()
    ((_, radio),) = scenario(**sweep, channel=RADIO).points()
    assert wire.channel.model_dump()["rate_bps"] == 5e6
    assert radio.channel.model_dump()["bandwidth_hz"] == 5e6
    ((_, point),) = scenario(**_sweep("energy_budget_joules", 7)).points()
    assert [d.energy_budget_joules for d in point.clusters[0].devices] == [7, 7]


@pytest.mark.parametrize("path", sorted(_READY.glob("*.toml")), ids=lambda path: path.stem)
def test_ready_scenario_is_valid_and_named_as_its_file(path: Path) -> None:
    assert read_scenario(read_scenario_file(path), str(path)).name == path.stem
