"""The limits of frames in real pipelines: no frame of a task is over its limit, and the largest ones come close."""

from pathlib import Path
from typing import Any

import pytest
from reference.tiny_jobs import make_job

from collapipe.tensors import Frame, FrameAssembler, FrameKind
from collapipe.tensors.frames import _check
from collapipe.v1.stage_pb2 import FrameHeader

from .clusters import MakeCluster, Ranges

MOST_TOKENS = 8
"""Most rows of the tasks that cut rows have more."""
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "classification": ("bert", {"hidden_size": 32}),
    "ner": ("distilbert", {"dim": 32}),
    "translation": ("marian", {"d_model": 32}),
    "causal_lm": ("gpt2", {"n_embd": 32}),
    "instruction": ("llama", {"hidden_size": 32}),
}
PLANS: dict[str, Ranges] = {
    "blocks on the device": [("control-unit-0", 0, 1), ("device-0-0", 1, 4), ("edge-server", 4, 5)],
    "all on the device": [("control-unit-0", 0, 0), ("device-0-0", 0, 5)],
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", JOBS)
def test_frames_of_every_task_stay_below_limits_that_are_hardly_larger(
    make_cluster: MakeCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    plan: str,
) -> None:
    shares: dict[FrameKind, float] = {}
    genuine = FrameAssembler.begin

    def begin(self: FrameAssembler, header: FrameHeader) -> Frame | None:
        frame = genuine(self, header)  # It refuses a frame over the limit.
        frame_kind = FrameKind(header.kind)
        share = sum(map(_check, header.tensors)) / self._limits[frame_kind]
        shares[frame_kind] = max(share, shares.get(frame_kind, 0.0))
        return frame

    monkeypatch.setattr(FrameAssembler, "begin", begin)
    family, config = JOBS[kind]
    job = make_job(tmp_path, family, kind, model_config=config)
    if kind != "instruction":  # Its rows are never cut.
        job = job.model_copy(
            update={"task": job.task.model_copy(update={"max_length": MOST_TOKENS})}
        )
    cluster = make_cluster(job)
    cluster.run_round(PLANS[plan], evaluate=True)
    assert shares.keys() == {
        FrameKind.FORWARD,
        FrameKind.BACKWARD,
        FrameKind.EVALUATE,
        FrameKind.PREDICTION,
        FrameKind.LABELS,
    }
    assert max(shares.values()) <= 1
    if plan == "blocks on the device" and kind != "instruction":
        assert min(shares[FrameKind.FORWARD], shares[FrameKind.BACKWARD]) > 0.9
