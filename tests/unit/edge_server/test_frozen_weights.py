"""Tests of the weights that LoRA freezes, and of adapters."""

from pathlib import Path
from typing import Any

import pytest

from collapipe.errors import NotFoundError
from collapipe.job import LoraConfig

from .edges import Edge


@pytest.fixture
def lora_edge(tmp_path: Path, vocabulary: bytes) -> Edge:
    edge = Edge(tmp_path / "lora", vocabulary)
    edge.prepare(lora=LoraConfig())
    return edge


def frozen_files(edge: Edge) -> list[Path]:
    return [edge.state / "frozen" / unit.frozen_digest for unit in edge.model.commit().global_units]


def test_every_commit_names_the_frozen_weights(lora_edge: Edge) -> None:
    edge = lora_edge
    digests = [unit.frozen_digest for unit in edge.model.commit().global_units]
    assert all(digests)
    assert edge.model.frozen_bytes() == [path.stat().st_size for path in frozen_files(edge)]
    assert sum(edge.model.unit_bytes()) < sum(edge.model.frozen_bytes())
    later = edge.commit(edge.train_all())
    for units in (later.global_units, *(cluster.units for cluster in later.clusters)):
        assert [unit.frozen_digest for unit in units] == digests


def test_frozen_weights_that_are_gone_are_made_again(lora_edge: Edge) -> None:
    edge = lora_edge
    path = frozen_files(edge)[1]
    before = path.read_bytes()
    path.unlink()
    edge.restart()
    edge.prepare(lora=LoraConfig())
    assert path.read_bytes() == before
    path.unlink()
    edge.restart()
    with pytest.raises(NotFoundError, match=path.name):
        edge.prepare(seed=1, lora=LoraConfig())


def test_new_job_replaces_damaged_frozen_weights(lora_edge: Edge) -> None:
    edge = lora_edge
    path = frozen_files(edge)[1]
    before = path.read_bytes()
    path.write_bytes(before[:-1] + b"?")
    edge.commits.delete("job")
    edge.restart()
    edge.prepare(lora=LoraConfig())
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("lora", "config", "merged", "is_adapter"),
    [
        ({}, {}, False, True),
        ({}, {}, True, False),
        ({"target_modules": ["query", "word_embeddings"]}, {}, False, False),
        ({}, {"num_hidden_layers": 1}, False, False),
        (None, {}, False, False),
    ],
)
def test_adapter_is_exported_if_it_gives_the_trained_model(
    edge: Edge,
    tmp_path: Path,
    lora: dict[str, Any] | None,
    config: dict[str, Any],
    merged: bool,
    is_adapter: bool,
) -> None:
    edge.model.export(tmp_path / "pretrained")
    edge.state = tmp_path / "another"
    edge.restart()
    settings = None if lora is None else LoraConfig(**lora)
    edge.prepare(config=config, pretrained=str(tmp_path / "pretrained"), lora=settings)
    edge.restart()
    [found] = edge.model.findings()  # A restarted edge server still has its findings.
    assert not found.is_warning and "2 of 2 labels" in found.what
    folder = tmp_path / "export"
    folder.mkdir()
    edge.model.export(folder, merged=merged)
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert ("adapter_model.safetensors" in names) == is_adapter
    assert ("model.safetensors" in names) == (not is_adapter)


def test_export_without_a_pretrained_model_is_whole(lora_edge: Edge, tmp_path: Path) -> None:
    lora_edge.model.export(tmp_path / "export")
    assert (tmp_path / "export" / "model.safetensors").is_file()
