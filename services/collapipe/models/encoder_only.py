"""The base of the families that have an encoder and a small head, which labels texts or tokens."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import apply_chunking_to_forward

from collapipe.finding import Finding
from collapipe.mistakes import say_some
from collapipe.models.adapter import ModelAdapter, ModelHead, cross_entropy_sum
from collapipe.models.pretrained import load_pretrained
from collapipe.models.unit import Side
from collapipe.pretrained_directories import pretrained_values

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class EncoderOnlyAdapter(ModelAdapter):
    """Cuts BERT and its relatives.

    A pretrained directory gives the encoder. If its model does the same task, the rows of its labelling layer that are of labels
    of the job stay, too.
    """

    attention_parts = frozenset({"attention"})
    always_trained = ("classifier", "pooler")
    fixed: ClassVar[Mapping[str, Any]] = {"is_decoder": False, "add_cross_attention": False}

    def run_embedding(self, module: nn.Module, side: Side) -> Tensor:
        embedded: Tensor = module(side["input_ids"])
        return embedded

    def run_attention(self, layer: Any, activation: Tensor, mask: Tensor | None) -> Tensor:
        attended: Tensor = layer.attention(activation, mask)[0]
        return attended

    def run_feed_forward(self, layer: Any, activation: Tensor) -> Tensor:
        output: Tensor = apply_chunking_to_forward(
            layer.feed_forward_chunk,
            layer.chunk_size_feed_forward,
            layer.seq_len_dim,
            activation,
        )
        return output

    def make_head(self, model: "PreTrainedModel") -> "LabelHead":
        return LabelHead(model)

    def read_pretrained(
        self, directory: Path, otherwise: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Reads the encoder, its pooler if there is one, and what stays of the labelling layer."""
        theirs = self._read_config_of(directory)
        rows = matching_labels(self._labels, theirs.id2label) if self._does_task(theirs) else {}
        with torch.device("meta"):
            model = self.build_model()
        if not rows:
            prefix = self.family
            encoder_class: Any = type(model.get_submodule(prefix))
            weights = load_pretrained(
                encoder_class, directory, self.config, self.base_dtype, may_lack="pooler."
            )
            return {f"{prefix}.{name}": tensor for name, tensor in weights.items()}
        config = copy.deepcopy(self.config)
        config.id2label = theirs.id2label
        weights = load_pretrained(type(model), directory, config, self.base_dtype)
        *_, last = (name for name, each in model.named_modules() if isinstance(each, nn.Linear))
        for name in (f"{last}.weight", f"{last}.bias"):
            kept = otherwise[name].clone()
            kept[list(rows)] = weights[name][list(rows.values())]
            weights[name] = kept
        return weights

    def describe_pretrained(self, directory: Path) -> list[Finding]:
        """Says what becomes of the labelling layer of a pretrained directory."""
        theirs = self._read_config_of(directory)
        if not self._does_task(theirs):
            others = [name.__name__ for name in self.model_classes.values()]
            found = [name for name in theirs.architectures or () if name in others]
            if not found:
                return []
            return [
                _dropped_layer(
                    directory, f"its model is a {found[0]} and task.kind is {self.task!r}"
                )
            ]
        rows = matching_labels(self._labels, theirs.id2label)
        dropped = [str(n) for i, n in theirs.id2label.items() if i not in rows.values()]
        new = [name for number, name in self._labels.items() if number not in rows]
        if not rows:
            return [
                _dropped_layer(
                    directory,
                    f"none of its labels ({say_some(dropped)}) is a label of the job ({say_some(new)})",
                    "rename the labels in the data to keep it",
                )
            ]
        parts = [f"{len(rows)} of {len(self._labels)} labels start from its labelling layer"]
        parts += [f"{say_some(new)} start from random weights"] * bool(new)
        parts += [f"its labels {say_some(dropped)} are dropped"] * bool(dropped)
        return [Finding("note", str(directory), "; ".join(parts))]

    @property
    def _labels(self) -> dict[int, str]:
        labels: Any = self.config.id2label
        return dict(labels or {})

    def _read_config_of(self, directory: Path) -> Any:
        return self.read_config(pretrained_values(directory))

    def _does_task(self, theirs: Any) -> bool:
        return self.model_classes[self.task].__name__ in (theirs.architectures or ())


def matching_labels(labels: Mapping[int, str], theirs: Mapping[int, str]) -> dict[int, int]:
    """Returns the numbers of a pretrained model's labels by those of a job's labels with the same names.

    `transformers` calls a label without a name `LABEL_3`, so this is also the name 3 of an integer label.
    """
    numbers = {str(name).removeprefix("LABEL_"): number for number, name in theirs.items()}
    numbers |= {str(name): number for number, name in theirs.items()}
    return {number: numbers[name] for number, name in labels.items() if name in numbers}


class LabelHead(ModelHead):
    """The layers behind the encoder: dropout, the classifier and, in some families, a pooler."""

    def loss_sum(self, activation: Tensor, side: Side, label_smoothing: float) -> Tensor:
        return cross_entropy_sum(self._logits(activation), side["labels"], label_smoothing)

    @torch.no_grad()
    def predict(self, activation: Tensor, side: Side) -> Tensor:
        return self._logits(activation).argmax(dim=-1)

    def _logits(self, activation: Tensor) -> Tensor:
        logits: Tensor = self.whole_model(inputs_embeds=activation).logits
        return logits


def _dropped_layer(directory: Path, reason: str, remedy: str = "") -> Finding:
    what = f"its labelling layer is not used, and that of the job starts from random weights, because {reason}"
    return Finding("warning", str(directory), what, remedy)
