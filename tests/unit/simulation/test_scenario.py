from pathlib import Path
from typing import Any

import pytest

from collapipe.errors import InvalidInputError
from collapipe.simulation import read_scenario
from collapipe_client.scenario_files import read_scenario_file

from .scenarios import RADIO, document, scenario

_READY = Path(__file__).parents[3] / "clients/experiments/scenarios"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"round": 3}, "tiny.toml: unknown key 'round'; did you mean 'rounds'"),
        ({"rounds": 0}, "rounds = 0: .*greater than or equal to 1"),
        ({"seeds": 0}, "seeds is 0: at least 1 seed"),
        ({"seeds": [3, -1]}, "a seed is at least 0"),
        ({"strategies": []}, "strategies"),
        ({"strategies": ["magic"]}, "strategies.0 = 'magic'"),
        ({"model": {"name": "gpt"}}, "model.name = 'gpt': Input should be 'bert-base'"),
        ({"clusters": []}, "clusters"),
        ({"clusters": [{"devices": []}]}, "devices"),
        ({"clusters": [{"devices": [{}]}]}, "a host needs a profile, or gigaflops"),
        ({"clusters": [{"devices": [{"profile": "abacus"}]}]}, "no device profile 'abacus'"),
        ({"clusters": [{"devices": [{"profil": "laptop"}]}]}, "did you mean 'profile'"),
        ({"control_unit": {"gigaflops": -1.0}}, "control_unit.gigaflops = -1.0"),
        ({"channel": {"kind": "pigeon"}}, "channel"),
        ({"channel": RADIO | {"bandwidth": 3}}, "did you mean 'bandwidth_hz'"),
        ({"channel": RADIO | {"rate_bps": 3}}, "unknown key 'channel.radio.rate_bps'"),
        ({"channel": {"kind": "wire", "rate_bps": float("nan")}}, "rate_bps"),
        (
            {"training": {"mini_batch": 8, "micro_batches": [3, 4]}},
            r"\[3\], which do not divide the mini-batch of 8: use some of \[1, 2, 4, 8\]",
        ),
        ({"sweep": {"parameter": "speed", "values": [1]}}, "sweep.parameter"),
        ({"sweep": {"parameter": "bandwidth", "values": []}}, "sweep.values"),
        ({"sweep": {"parameter": "bandwidth", "values": [0]}}, "sweep.values has 0"),
        ({"sweep": {"parameter": "heterogeneity", "values": [0.5]}}, "sweep.values has 0.5"),
        ({"sweep": {"parameter": "devices_per_cluster", "values": [0]}}, "sweep.values has 0"),
        (
            {"sweep": {"parameter": "devices_per_cluster", "values": [1.5]}},
            "not a whole number of devices",
        ),
        ({"sweep": {"parameter": "clusters", "values": [1.5]}}, "not a whole number of clusters"),
        (
            {"world": {"absence": 0.6}},
            "absence is 0.6 with absence_rounds = 1: .* away at most 0.5 of the time",
        ),
        (
            {
                "clusters": [
                    {"devices": [{"gigaflops": 1, "battery_joules": 9, "energy_budget_joules": 3}]}
                ]
            },
            "battery_joules = 9 and energy_budget_joules = 3: give only one",
        ),
    ],
)
def test_bad_scenario_says_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        read_scenario(document(**changes), "tiny.toml")


def test_missing_channel_is_named() -> None:
    without = document()
    del without["channel"]
    with pytest.raises(InvalidInputError, match="'channel' is missing"):
        read_scenario(without, "tiny.toml")


def test_all_mistakes_are_reported_together() -> None:
    with pytest.raises(InvalidInputError) as caught:
        read_scenario(document(rounds=0, seed=1), "tiny.toml")
    assert len(str(caught.value).splitlines()) == 2


def test_micro_batches_default_to_every_divisor() -> None:
    assert scenario(training={"mini_batch": 12}).training.micro_batch_options == (
        1,
        2,
        3,
        4,
        6,
        12,
    )


def test_sweep_makes_one_scenario_a_value() -> None:
    swept = scenario(sweep={"parameter": "penalty_weight", "values": [1, 10]})
    assert [(v, p.schedule.penalty_weight, p.sweep) for v, p in swept.points()] == [
        (1, 1, None),
        (10, 10, None),
    ]
    assert [value for value, _ in scenario().points()] == [None]


def test_sweep_of_devices_repeats_the_list() -> None:
    swept = scenario(sweep={"parameter": "devices_per_cluster", "values": [1, 3]})
    one, three = (point.clusters[0].devices for _, point in swept.points())
    assert [device.gigaflops for device in one] == [40.0]
    assert [device.gigaflops for device in three] == [40.0, 10.0, 40.0]


def test_sweep_of_clusters_repeats_the_list() -> None:
    kinds = [
        {"devices": [{"gigaflops": 40.0}], "count": 2},
        {"devices": [{"gigaflops": 10.0}]},
    ]
    swept = scenario(clusters=kinds, sweep={"parameter": "clusters", "values": [1, 4]})
    one, four = (
        [cluster.devices[0].gigaflops for cluster in point.clusters for _ in range(cluster.count)]
        for _, point in swept.points()
    )
    assert one == [40.0]
    assert four == [40.0, 40.0, 10.0, 40.0]


def test_sweep_of_bandwidth_sets_the_channel() -> None:
    sweep = {"parameter": "bandwidth", "values": [5e6]}
    ((_, wire),) = scenario(sweep=sweep).points()
    ((_, radio),) = scenario(sweep=sweep, channel=RADIO).points()
    assert wire.channel.model_dump()["rate_bps"] == 5e6
    assert radio.channel.model_dump()["bandwidth_hz"] == 5e6


def test_sweep_of_budgets_gives_every_device_one() -> None:
    swept = scenario(sweep={"parameter": "energy_budget_joules", "values": [7]})
    ((_, point),) = swept.points()
    assert [d.energy_budget_joules for d in point.clusters[0].devices] == [7, 7]


@pytest.mark.parametrize("path", sorted(_READY.glob("*.toml")), ids=lambda path: path.stem)
def test_ready_scenario_is_valid_and_named_as_its_file(path: Path) -> None:
    assert read_scenario(read_scenario_file(path), str(path)).name == path.stem
