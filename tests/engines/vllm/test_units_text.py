"""Tokenizers and processors that are not there: what they answer, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from probe_cli.engines.vllm.text import NO_TOKEN, AbsentTokenizer, absent_processor
from probe_cli.errors import EngineError


def test_placeholder_tokens_have_no_id() -> None:
    tokenizer = AbsentTokenizer()
    assert tokenizer
    assert tokenizer.vocab["<image>"] == tokenizer.get_vocab()["<video>"] == NO_TOKEN
    assert tokenizer.encode("<image>", add_special_tokens=False) == [NO_TOKEN]
    assert tokenizer.convert_tokens_to_ids("<image>") == NO_TOKEN
    assert tokenizer.convert_tokens_to_ids(["<image>", "a"]) == [NO_TOKEN, NO_TOKEN]


@pytest.mark.parametrize(
    "ask",
    [len, lambda t: len(t.vocab), lambda t: t.vocab_size, lambda t: t.decode([1])],
    ids=["len", "vocab", "size", "decode"],
)
def test_what_could_shape_a_layer_is_refused(ask: object) -> None:
    assert callable(ask)
    with pytest.raises(EngineError, match="a build has no tokenizer to answer"):
        ask(AbsentTokenizer())


@pytest.mark.vllm
def test_a_processor_has_the_parts_of_its_class(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}))
    processor = absent_processor(str(tmp_path), trust_remote_code=False)
    assert hasattr(processor, "image_processor") and not hasattr(processor, "feature_extractor")
    assert not hasattr(processor, "tokenizer")
    hash(processor)  # vLLM keeps processors in sets and dictionaries


@pytest.mark.vllm
def test_a_model_without_a_processor_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert absent_processor(str(tmp_path), trust_remote_code=False) is None
