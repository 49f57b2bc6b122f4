from typing import Any

import pytest
from emulated_links import ChangingEmulation

from collapipe.emulation.emulation_file import EmulationFile
from collapipe.rpc import ChannelPool, Security
from collapipe.stage_host import HostResources
from collapipe.stage_host.profile_servicer import ProfileServicer
from collapipe.stage_runtime import CPU, block_profile
from collapipe.traffic_shaping.outgoing_links import OutgoingLinks
from collapipe.traffic_shaping.pacing import PacedShaper
from collapipe.v1.plan_pb2 import ModelSpec
from collapipe.v1.profile_pb2 import ProfileBlockRequest, ProfileBlockResponse
from collapipe.weights.blob_cache import BlobCache


@pytest.fixture(autouse=True)
def _no_time_box(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_profile, "_TIME_BOX_SECONDS", 0.0)


def profile(
    emulation: EmulationFile, config_json: str, *sizes: int, length: int = 8
) -> ProfileBlockResponse:
    links = OutgoingLinks("device-0-0", emulation, PacedShaper())
    resources = HostResources(CPU, ChannelPool(Security.insecure()), links, BlobCache())
    model = ModelSpec(family="bert", task="classification", config_json=config_json)
    request = ProfileBlockRequest(model=model, micro_batch_sizes=sizes, sequence_length=length)
    context: Any = None
    return ProfileServicer(resources).ProfileBlock(request, context)


def test_profile_has_the_costs_of_a_block(bert_config_json: str) -> None:
    answer = profile(EmulationFile(None), bert_config_json, 1, 4)
    assert answer.seconds_per_sample > 0
    assert answer.seconds_per_micro_batch >= 0
    assert answer.num_parameters > 0
    assert answer.state_bytes == 16 * answer.num_parameters
    assert answer.stash_bytes_per_sample > 8 * 16 * 4


def test_profile_of_an_emulated_device_does_not_depend_on_sizes(
    bert_config_json: str, emulation: ChangingEmulation
) -> None:
    emulation.set(devices={"device-0-0": {"profile": "raspberry-pi-4"}})
    small = profile(emulation.file, bert_config_json, 2, 8)
    large = profile(emulation.file, bert_config_json, 1, 16)
    assert small.seconds_per_sample == pytest.approx(large.seconds_per_sample)
    assert small.seconds_per_micro_batch == pytest.approx(9e-3)
    assert (*small.work_shares, *small.stash_shares) == (1.0, 1.0)
