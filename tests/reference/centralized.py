"""Trains one cluster in a plain loop, with a whole model of `transformers` and one optimizer."""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from collapipe.job import JobConfig, TrainingConfig

MicroBatch = Mapping[str, Tensor]
"""The tensors `input_ids`, `attention_mask` and `labels`."""
MiniBatch = Sequence[MicroBatch]

IGNORED = -100

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose modules have the names of Llama's."""
MODULES = {
    "bert": ("bert.embeddings", "bert.encoder.layer", "intermediate"),
    "distilbert": ("distilbert.embeddings", "distilbert.transformer.layer", "ffn"),
    "roberta": ("roberta.embeddings", "roberta.encoder.layer", "intermediate"),
    # The forward pass of these encoders, and that of GPT-2, begins with the embedding.
    "marian": ("model.encoder", "model.encoder.layers", "fc1"),
    "bart": ("model.encoder", "model.encoder.layers", "fc1"),
    "gpt2": ("transformer", "transformer.h", "ln_2"),
    **dict.fromkeys(LLAMA_LIKE, ("model.embed_tokens", "model.layers", "post_attention_layernorm")),
}
"""The embedding of each family, its layers, and the module of a layer's feed-forward network that runs first."""
HEADS = {
    ("bert", "classification"): "bert.pooler",
    ("bert", "ner"): "dropout",
    ("distilbert", "classification"): "pre_classifier",
    ("distilbert", "ner"): "dropout",
    ("roberta", "classification"): "classifier",
    ("roberta", "ner"): "dropout",
    ("marian", "translation"): "model.decoder",
    ("bart", "translation"): "model.decoder",
    ("gpt2", "causal_lm"): "transformer.ln_f",
    ("gpt2", "instruction"): "transformer.ln_f",
    **{(f, k): "model.norm" for f in LLAMA_LIKE for k in ("causal_lm", "instruction")},
}
"""The module of each head that runs first."""


def train_cluster(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    mini_batches: Iterable[MiniBatch],
    job: JobConfig,
    cluster_index: int = 0,
    round_index: int = 0,
    first_step: int = 0,
) -> list[float]:
    """Trains the local steps of one round in place, and returns the loss of each optimizer step.

    Args:
        optimizer: An optimizer from `make_optimizer`, with the moments of previous rounds.
        mini_batches: One mini-batch for each local step, as a list of micro-batches.
        first_step: Optimizer steps of the job before this round.
    """
    training, kind = job.training, job.task.kind
    model.train()
    losses: list[float] = []
    for update in _updates(mini_batches, training):
        step = len(losses)
        optimizer.zero_grad(set_to_none=True)
        num_targets = sum(int((batch["labels"] != IGNORED).sum()) for batch in update)
        loss_of_step = 0.0
        for number, batch in enumerate(update):
            key_of = partial(dropout_key, job.seed, cluster_index, round_index, step, number)
            with seeded_units(model, kind, key_of, half_blocks=job.model.half_blocks):
                logits = compute_logits(model, kind, batch)
            loss_sum = nn.functional.cross_entropy(
                logits.reshape(-1, logits.shape[-1]).float(),
                batch["labels"].reshape(-1),
                ignore_index=IGNORED,
                reduction="sum",
                label_smoothing=training.label_smoothing,
            )
            loss: Any = loss_sum / max(num_targets, 1)
            loss.backward()
            loss_of_step += loss.item()
        clip_gradients(model, training.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(training, first_step + step, job.total_steps)
        optimizer.step()
        losses.append(loss_of_step)
    return losses


def make_optimizer(model: PreTrainedModel, training: TrainingConfig) -> torch.optim.Optimizer:
    """Makes the optimizer of a job. Weight decay applies to matrices, but not to vectors."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    if training.optimizer == "sgd":
        return torch.optim.SGD(
            groups, lr=training.learning_rate, momentum=training.momentum, fused=True
        )
    return torch.optim.AdamW(
        groups, lr=training.learning_rate, betas=training.betas, eps=training.epsilon, fused=True
    )


def dropout_key(
    seed: int, cluster: int, round_index: int, step: int, micro_batch: int, unit: int
) -> int:
    """Returns the random seed for one forward pass of one unit."""
    text = f"{seed}/{cluster}/{round_index}/{step}/{micro_batch}/{unit}"
    return int.from_bytes(hashlib.sha256(text.encode("ascii")).digest()[:8], "little") >> 1


def learning_rate(training: TrainingConfig, step: int, total_steps: int) -> float:
    """Returns the learning rate of an optimizer step. Steps are counted from 0 over the whole job."""
    peak, warm_up = training.learning_rate, training.num_warm_up_steps(total_steps)
    number = step + 1
    if number <= warm_up:
        return peak * number / warm_up
    if training.decay == "linear":
        return peak * (total_steps - step) / (total_steps - warm_up)
    if training.decay == "inverse_sqrt":
        return peak * math.sqrt(max(warm_up, 1) / number)
    return peak


def clip_gradients(model: nn.Module, clip_norm: float) -> None:
    """Scales all gradients down if their global norm is too large."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not clip_norm:
        return
    norms = [float(torch.linalg.vector_norm(g, dtype=torch.float64)) for g in gradients]
    norm = math.sqrt(math.fsum(norm**2 for norm in norms))
    scale = min(1.0, clip_norm / (norm + 1e-6))
    if scale < 1.0:
        for gradient in gradients:
            gradient.mul_(scale)


def compute_logits(model: PreTrainedModel, kind: str, batch: MicroBatch) -> Tensor:
    """Runs the model's own forward pass."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    if kind == "translation":
        config = model.config
        targets = batch["labels"].masked_fill(batch["labels"] == IGNORED, config.pad_token_id)
        start = torch.full_like(targets[:, :1], config.decoder_start_token_id)
        inputs["decoder_input_ids"] = torch.cat([start, targets[:, :-1]], dim=1)
        logits: Tensor = model(**inputs, use_cache=False).logits
        return logits
    # A cache would copy keys and values, and on some processors other strides round otherwise.
    options = {"use_cache": False} if kind in ("causal_lm", "instruction") else {}
    logits = model(**inputs, **options).logits
    return logits


@contextmanager
def seeded_units(
    model: PreTrainedModel, kind: str, key_of: Callable[[int], int], *, half_blocks: bool = False
) -> Iterator[None]:
    """Seeds torch before each unit of a whole model, as the pipeline does.

    Args:
        kind: The task.
        key_of: Returns the seed of a unit. Unit 0 is the embedding, and the last unit is the head.
        half_blocks: Whether the attention and the feed-forward network of a layer are two units.
    """

    def seed_before(unit: int, module: nn.Module) -> RemovableHandle:
        def seed(_module: nn.Module, _inputs: object) -> None:
            torch.manual_seed(key_of(unit))

        return module.register_forward_pre_hook(seed)

    modules = first_modules(model, kind, half_blocks=half_blocks)
    hooks = [seed_before(unit, module) for unit, module in enumerate(modules)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def first_modules(
    model: PreTrainedModel, kind: str, *, half_blocks: bool = False
) -> list[nn.Module]:
    """Returns the module of each unit that runs first."""
    family = str(model.config.model_type)
    embedding, layers, feed_forward = MODULES[family]
    blocks: list[nn.Module] = list(model.get_submodule(layers).children())
    if half_blocks:
        blocks = [half for block in blocks for half in (block, block.get_submodule(feed_forward))]
    return [model.get_submodule(embedding), *blocks, model.get_submodule(HEADS[family, kind])]


def _updates(mini_batches: Iterable[MiniBatch], training: TrainingConfig) -> Iterator[MiniBatch]:
    """Yields the micro-batches of each optimizer step: a whole mini-batch, or a single micro-batch."""
    for mini_batch in mini_batches:
        if training.update_per == "micro_batch":
            yield from ([micro_batch] for micro_batch in mini_batch)
        else:
            yield mini_batch
