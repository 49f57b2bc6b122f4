"""One rank of torch's own pipeline (1F1B over gloo), with which `benchmarks.two_machines` compares.

Rank 0 has the embedding of a BERT, the last rank the head, and each rank between them some blocks. Reads numbers of steps
from standard input, and prints the seconds of so many steps. Gradients are clipped by the norm of the rank alone, which
costs less than the norm of the whole model.
"""

import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn import functional
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertEmbeddings, BertLayer

from collapipe.service_process import tune_allocator


class Embedding(nn.Module):
    """Token ids to hidden states."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(config)

    def forward(self, token_ids: Tensor) -> Tensor:
        hidden: Tensor = self.embeddings(input_ids=token_ids)
        return hidden


class Blocks(nn.Module):
    """Consecutive blocks of the encoder."""

    def __init__(self, config: BertConfig, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BertLayer(config) for _ in range(count))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            output = block(hidden)
            hidden = output[0] if isinstance(output, tuple) else output
        return hidden


class Head(nn.Module):
    """Classifies by the first token."""

    def __init__(self, config: BertConfig, labels: int) -> None:
        super().__init__()
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, labels)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.classifier(torch.tanh(self.pooler(hidden[:, 0])))
        return logits


def main(rank: int, shape: dict[str, Any], blocks: list[int], labels: int) -> None:
    """Joins the other ranks, at the address in `MASTER_ADDR` and `MASTER_PORT`, and runs steps until the input ends.

    Args:
        shape: Settings of `BertConfig`, and `rows`, `tokens` and `micro_batches`.
        blocks: Blocks of each rank between the first and the last one.
    """
    tune_allocator()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows, tokens = shape.pop("rows"), shape.pop("tokens")
    micro_batches = shape.pop("micro_batches")
    config = BertConfig(**shape, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config._attn_implementation = "sdpa"
    last = len(blocks) + 1
    module: nn.Module
    if rank == 0:
        module = Embedding(config)
    else:
        module = Head(config, labels) if rank == last else Blocks(config, blocks[rank - 1])
    distributed.init_process_group("gloo", rank=rank, world_size=last + 1)
    stage = pipelining.PipelineStage(module, rank, last + 1, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, micro_batches, loss_fn=functional.cross_entropy)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(0)
    print("ready", flush=True)
    for line in sys.stdin:
        distributed.barrier()
        started = time.perf_counter()
        for _ in range(int(line)):
            ids = torch.randint(0, config.vocab_size, (rows, tokens), generator=generator)
            if rank == 0:
                schedule.step(ids)
            elif rank == last:
                schedule.step(target=ids[:, 0] % labels, losses=[])
            else:
                schedule.step()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        distributed.barrier()
        print(time.perf_counter() - started, flush=True)
    os._exit(0)  # gloo would wait for the other ranks.


if __name__ == "__main__":
    main(int(sys.argv[1]), **json.loads(sys.argv[2]))
