"""The fixture of a stage host, which gives signs of life often."""

from collections.abc import Iterator

import pytest
from torch import Tensor

from collapipe.models import ModelAdapter
from collapipe.rpc import streams

from .stage_hosts import StageHost, stage_host


@pytest.fixture
def host(
    bert: ModelAdapter,
    bert_config_json: str,
    bert_states: list[dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[StageHost]:
    """A host that runs units 1 to 4 of the tiny BERT, on loopback."""
    monkeypatch.setattr(streams, "SIGN_OF_LIFE_SECONDS", 0.02)
    with stage_host(bert, bert_config_json, bert_states) as started:
        yield started
