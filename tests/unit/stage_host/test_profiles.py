from pathlib import Path
from typing import Any

import pytest

from collapipe.emulation.emulation_file import EmulatedDevice, Emulation, EmulationFile
from collapipe.errors import InvalidInputError
from collapipe.rpc import ChannelPool, Security
from collapipe.stage_host import HostResources
from collapipe.stage_host.profile_servicer import ProfileServicer
from collapipe.stage_runtime import CPU, block_profile
from collapipe.traffic_shaping.outgoing_links import OutgoingLinks
from collapipe.traffic_shaping.pacing import PacedShaper
from collapipe.v1.plan_pb2 import ModelSpec
from collapipe.v1.profile_pb2 import ProfileBlockRequest
from collapipe.weights.blob_cache import BlobCache

NO_CONTEXT: Any = None


@pytest.fixture(autouse=True)
def _no_time_box(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_profile, "_TIME_BOX_SECONDS", 0.0)


def servicer(emulation: Path | None = None) -> ProfileServicer:
    file = EmulationFile(emulation)
    links = OutgoingLinks("device-0-0", file, PacedShaper())
    channels = ChannelPool(Security.insecure())
    return ProfileServicer(HostResources(CPU, channels, links, BlobCache()))


def request(config_json: str, *sizes: int, length: int = 8) -> ProfileBlockRequest:
    model = ModelSpec(family="bert", task="classification", config_json=config_json)
    return ProfileBlockRequest(model=model, micro_batch_sizes=sizes, sequence_length=length)


def test_profile_has_the_costs_of_a_block(bert_config_json: str) -> None:
    answer = servicer().ProfileBlock(request(bert_config_json, 1, 4), NO_CONTEXT)
    assert answer.seconds_per_sample > 0
    assert answer.seconds_per_micro_batch >= 0
    assert answer.num_parameters > 0
    assert answer.state_bytes == 16 * answer.num_parameters
    assert answer.stash_bytes_per_sample > 8 * 16 * 4


def test_profile_of_an_emulated_device_does_not_depend_on_sizes(
    bert_config_json: str, tmp_path: Path
) -> None:
    path = tmp_path / "emulation.json"
    devices = {"device-0-0": EmulatedDevice(profile="raspberry-pi-4")}
    path.write_text(Emulation(devices=devices).model_dump_json())
    emulated = servicer(path)
    small = emulated.ProfileBlock(request(bert_config_json, 2, 8), NO_CONTEXT)
    large = emulated.ProfileBlock(request(bert_config_json, 1, 16), NO_CONTEXT)
    assert small.seconds_per_sample == pytest.approx(large.seconds_per_sample)
    assert small.seconds_per_micro_batch == pytest.approx(9e-3)


def test_sequence_length_of_zero_is_refused(bert_config_json: str) -> None:
    with pytest.raises(InvalidInputError, match="at least 1"):
        servicer().ProfileBlock(request(bert_config_json, 2, length=0), NO_CONTEXT)


def test_request_without_sizes_is_refused(bert_config_json: str) -> None:
    with pytest.raises(InvalidInputError, match="needs micro-batch sizes"):
        servicer().ProfileBlock(request(bert_config_json), NO_CONTEXT)
