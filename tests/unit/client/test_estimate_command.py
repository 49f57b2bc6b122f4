import json

import pytest
from typer.testing import CliRunner

from collapipe.errors import InvalidInputError
from collapipe_client.box_options import read_boxes
from collapipe_client.cli import app

_RUNNER = CliRunner()
_COMMAND = ["plan", "estimate", "--preset", "classification", "--set", "clusters=1"]


def test_boxes_have_a_number_a_profile_a_memory_and_a_link() -> None:
    one, other, laptop = read_boxes("2xpi4:3GB@20Mbit/s, laptop@wifi", "--devices")
    assert one == other
    assert (one.profile, one.memory_bytes, one.link.rate_bps) == ("pi4", 3_000_000_000, 20e6)
    assert one.training_bytes == 3_000_000_000
    assert laptop.link.in_direction("up").rate_bps == 50e6
    assert laptop.training_bytes == laptop.device.memory_bytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pi3", "there is no device profile 'pi3'"),
        ("0xpi4", "is not of the form"),
        ("pi4@fast", "a network profile: lan, wifi"),
        ("pi4:big", "'big' is not a size"),
    ],
)
def test_wrong_box_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        read_boxes(text, "--devices")


def test_estimate_of_a_preset_without_data_fits_three_raspberry_pis() -> None:
    done = _RUNNER.invoke(app, [*_COMMAND, "--devices", "3xpi4@20mbit", "--json"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.output)
    assert answer["fits"]
    assert "labels" in answer["notes"][0]
    (cluster,) = answer["clusters"]
    assert [host["num_blocks"] for host in cluster["hosts"]] == [0, 2, 2, 2, 0]
    # MiniLM has six layers of 1,774,464 parameters. Headers of the blobs come on top.
    assert cluster["hosts"][1]["pushed_bytes"] == pytest.approx(2 * 4 * 1_774_464, rel=1e-3)


def test_exit_code_and_text_say_that_a_model_does_not_fit() -> None:
    done = _RUNNER.invoke(app, [*_COMMAND, "--devices", "2xpi4:60MB"])
    assert done.exit_code == 1, done.output
    assert "it does not fit: device-0-0" in done.output
    assert "--set model.lora.r=8" in done.output
