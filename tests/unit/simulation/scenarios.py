"""The smallest useful scenario. Tests change parts of it."""

from typing import Any

from collapipe.simulation import Scenario, read_scenario


def document(**changes: Any) -> dict[str, Any]:
    """Returns a scenario file with a fast and a slow device on wires. `changes` replace whole sections."""
    return {
        "name": "tiny",
        "rounds": 3,
        "strategies": ["pipeline"],
        "model": {"name": "bert-base", "sequence_length": 32},
        "training": {"mini_batch": 8, "local_steps": 2, "micro_batches": [2, 4]},
        "channel": {"kind": "wire", "rate_bps": 1e8},
        "world": {"shuffle_devices": False},
        "control_unit": {"gigaflops": 50.0},
        "clusters": [
            {
                "devices": [
                    {"gigaflops": 40.0, "busy_watts": 10.0},
                    {"gigaflops": 10.0, "busy_watts": 5.0},
                ]
            }
        ],
        **changes,
    }


def scenario(**changes: Any) -> Scenario:
    """Returns the validated scenario."""
    return read_scenario(document(**changes), "tiny.toml")


RADIO = {"kind": "radio", "bandwidth_hz": 20e6, "cluster_radius_m": 10, "area_radius_m": 20}
