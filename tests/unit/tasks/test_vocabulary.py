"""Vocabularies are made, read and exported; `transformers` then produces the token ids of training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, normalizers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

from collapipe.errors import InvalidInputError
from collapipe.job import ModelConfig, TaskConfig
from collapipe.models import adapter_class, adapter_for, create_config_json
from collapipe.tasks import Task, parse_vocabulary, write_tokenizer_files
from collapipe.tasks.vocabulary import Vocabulary, make_vocabulary, read_vocabulary

TEXTS = ["Ada Lovelace lives in London", "Zwei Männer lesen ein Buch", "it's a dog, isn't it?"] * 3
LANGUAGE_MODELS = ["gpt2", "llama", "mistral", "qwen2", "qwen3"]
FAMILIES = ["bert", "distilbert", "roberta", "marian", "bart", *LANGUAGE_MODELS]
_LANGUAGE_MODEL = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
_TRANSLATOR = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1}
_LABELLER = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY: dict[str, dict[str, int]] = {
    **dict.fromkeys(LANGUAGE_MODELS, _LANGUAGE_MODEL),
    **dict.fromkeys(("marian", "bart"), _TRANSLATOR),
    **dict.fromkeys(("bert", "roberta", "distilbert"), _LABELLER),
}
LoadRows = Callable[..., Task]


def special_token_ids(vocabulary: bytes, family: str) -> dict[str, int]:
    return adapter_class(family).special_token_ids(Tokenizer.from_str(vocabulary.decode()))


def export(directory: Path, family: str, kind: str, vocabulary: bytes, labels: list[str]) -> Any:
    """Writes a tiny model like the edge server, and returns it."""
    task = TaskConfig.model_validate({"kind": kind, "max_length": 32, "max_new_tokens": 5})
    config_json = create_config_json(
        ModelConfig(family=family, config=TINY[family]),
        task,
        labels,
        Tokenizer.from_str(vocabulary.decode()),
    )
    torch.manual_seed(0)
    model: Any = adapter_for(family, kind, config_json).build_model()
    model.eval()
    model.save_pretrained(directory)
    write_tokenizer_files(directory, vocabulary, family, 32)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_made_vocabulary_knows_every_text_and_loses_nothing(family: str) -> None:
    data = make_vocabulary(TEXTS, 320, family)
    assert make_vocabulary(TEXTS, 320, family) == data
    tokenizer = Tokenizer.from_str(data.decode())
    assert 256 < tokenizer.get_vocab_size() <= 320
    special = special_token_ids(data, family)
    text = "never seen: ☃ Ωmega  two spaces"
    ids = tokenizer.encode(text).ids
    assert special["unk_token"] not in ids
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    "text", ["a <s> b", "a <S>b", "a<end>b", "a <end> b", "a <END> b", "a <Word>, b", "a<word>b"]
)
def test_special_token_is_found_in_a_text_where_the_tokenizer_reads_it(text: str) -> None:
    tokenizer = Tokenizer.from_str(make_vocabulary(TEXTS, 320, "bert").decode())
    tokenizer.normalizer = normalizers.Lowercase()
    added = [
        AddedToken("<S>", normalized=True, special=True),
        AddedToken("<end>", normalized=False, special=True),
        AddedToken("<word>", normalized=True, single_word=True, special=True),
    ]
    tokenizer.add_special_tokens(added)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    [*read] = {tokenizer.token_to_id(token.content) for token in added}.intersection(ids)
    found = Vocabulary(tokenizer.to_str().encode(), "bert", 32).special_token_in(text)
    assert found.lower() == (tokenizer.id_to_token(read[0]) if read else "")


def test_made_vocabulary_of_long_rules_and_letters_of_dna_can_be_read() -> None:
    rows = ["-" * 1500 + " a"] * 3 + ["ACGT" * 400] * 3
    parse_vocabulary(make_vocabulary(rows, 8000, "gpt2"))


def test_special_token_ids_follow_the_family() -> None:
    ids = {
        family: special_token_ids(make_vocabulary(TEXTS, 300, family), family)
        for family in FAMILIES
    }
    bert = {"pad_token": 0, "unk_token": 1, "cls_token": 2, "sep_token": 3}
    roberta = {"bos_token": 0, "pad_token": 1, "eos_token": 2, "unk_token": 3}
    roberta |= {"cls_token": roberta["bos_token"], "sep_token": roberta["eos_token"]}
    assert ids["bert"] == ids["distilbert"] == bert
    assert ids["roberta"] == ids["bart"] == roberta
    assert ids["marian"] == {"pad_token": 0, "eos_token": 1, "unk_token": 2}


def test_vocabulary_that_cannot_be_made_or_read_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=" 100, .* 256 .* 4 .* 260"):
        make_vocabulary(TEXTS, 100, "bert")
    with pytest.raises(InvalidInputError, match="'gpt9'.* bert, "):
        make_vocabulary(TEXTS, 300, "gpt9")
    with pytest.raises(InvalidInputError, match=r"'\[PAD\]', .*'bert'"):
        Vocabulary(make_vocabulary(TEXTS, 300, "marian"), "bert", max_length=8)
    with pytest.raises(InvalidInputError, match=r"5 bytes.*tokenizer\.json"):
        Vocabulary(b"{nope", "bert", max_length=8)


def test_read_vocabulary_neither_pads_nor_cuts(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(make_vocabulary(TEXTS, 300, "bert").decode())
    ids = tokenizer.encode("a b c d e f g h").ids
    tokenizer.enable_padding(length=50)
    tokenizer.enable_truncation(6)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    read = Tokenizer.from_str(read_vocabulary(tmp_path, "bert").decode())
    assert read.encode("a b c d e f g h").ids == ids


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta"])
def test_exported_classifier_sees_the_token_ids_of_training(
    family: str, tmp_path: Path, load_rows: LoadRows
) -> None:
    rows = [{"text": text, "label": f"l{i % 2}"} for i, text in enumerate(TEXTS)]
    task = load_rows("classification", rows, model={"family": family})
    model = export(tmp_path / "model", family, "classification", task.vocabulary, task.labels)
    classify: Any = pipeline("text-classification", str(tmp_path / "model"))
    for index, text in enumerate(TEXTS[:3]):
        [batch] = task.micro_batches([index], 1)
        assert classify.tokenizer(text)["input_ids"] == batch.tensors["input_ids"][0].tolist()
        with torch.no_grad():
            logits = model(batch.tensors["input_ids"], batch.tensors["attention_mask"]).logits[0]
        [answer] = classify(text)
        assert answer["label"] == task.labels[int(logits.argmax())]
        assert answer["score"] == pytest.approx(float(logits.softmax(0).max()), rel=1e-5)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_exported_tagger_sees_the_token_ids_of_training(
    family: str, tmp_path: Path, load_rows: LoadRows
) -> None:
    sentence = "Ada B-person\nLovelace I-person\nisn't O\n, O\nLondon B-place\n"
    task = load_rows("ner", "\n".join([sentence] * 5), model={"family": family})
    export(tmp_path / "model", family, "ner", task.vocabulary, task.labels)
    tag: Any = pipeline("token-classification", str(tmp_path / "model"))
    text = "Ada Lovelace isn't , London"
    [batch] = task.micro_batches([0], 1)
    ids = batch.tensors["input_ids"][0].tolist()
    assert tag.tokenizer(text)["input_ids"] == ids
    offsets = tag.tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    firsts = [offsets[i] for i, label in enumerate(batch.tensors["labels"][0]) if label != -100]
    assert len(firsts) == 5
    assert [text[:end].split()[-1][0] for _, end in firsts] == ["A", "L", "i", ",", "L"]
    assert tag(text)


@pytest.mark.parametrize("family", ["marian", "bart"])
def test_exported_translator_sees_the_token_ids_of_training(
    family: str, tmp_path: Path, load_rows: LoadRows
) -> None:
    rows = [{"en": text, "de": text[::-1]} for text in TEXTS]
    task = load_rows("translation", rows, model={"family": family})
    export(tmp_path / "model", family, "translation", task.vocabulary, [])
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    for index, text in enumerate(TEXTS[:3]):
        [batch] = task.micro_batches([index], 1)
        encoded = tokenizer(text, text_target=text[::-1], return_tensors="pt")
        assert encoded["input_ids"].tolist() == batch.tensors["input_ids"].tolist()
        assert encoded["labels"].tolist() == batch.tensors["labels"].tolist()
    special = special_token_ids(task.vocabulary, family)
    start = special["pad_token" if family == "marian" else "eos_token"]
    assert model.config.decoder_start_token_id == start
    assert tokenizer.pad_token_id == special["pad_token"]
    assert tokenizer.eos_token_id == special["eos_token"]
    generated = model.generate(**tokenizer(TEXTS[0], return_tensors="pt"), max_new_tokens=4)
    assert generated[0, 0] == start
    assert tokenizer.decode(encoded["labels"][0], skip_special_tokens=True) == TEXTS[2][::-1]


@pytest.mark.parametrize("family", LANGUAGE_MODELS)
@pytest.mark.parametrize("has_pad_token", [True, False])
def test_exported_language_model_sees_the_token_ids_of_training(
    family: str, has_pad_token: bool, tmp_path: Path
) -> None:
    data = make_vocabulary(TEXTS, 320, family)
    if not has_pad_token:
        pad = adapter_class(family).special_tokens.by_role["pad_token"]
        data = data.replace(pad.encode(), b"<other>") if family != "gpt2" else data
    export(tmp_path, family, "causal_lm", data, [])
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    vocabulary = Vocabulary(data, family, max_length=32)
    for text in [*TEXTS[:3], "Return  the\n value, e\u0301"]:
        [encoding] = vocabulary.encode([text])
        assert tokenizer(text)["input_ids"] == encoding.ids
    assert tokenizer.eos_token_id == vocabulary.end_id
    assert tokenizer.pad_token_id == vocabulary.pad_id
    assert len(tokenizer) <= model.config.vocab_size
