"""Tokenizers and processors that are not there: a load needs none, but constructors ask them small things."""

from __future__ import annotations

from typing import Any

from probe_cli.errors import EngineError

__all__ = ["NO_TOKEN", "AbsentTokenizer", "absent_processor"]

#: A token id that no vocabulary has.
NO_TOKEN = -1


class _Vocabulary(dict[str, int]):
    """Every token is in it, and has no id."""

    def __missing__(self, token: str) -> int:
        return NO_TOKEN

    def __len__(self) -> int:
        raise _unanswered("the size of its vocabulary")


class AbsentTokenizer:
    """Knows no id of any token. What could shape a layer (the size of the vocabulary) is refused, with EngineError."""

    @property
    def vocab(self) -> dict[str, int]:
        return _Vocabulary()

    def get_vocab(self) -> dict[str, int]:
        return self.vocab

    def encode(self, text: str, **options: Any) -> list[int]:
        return [NO_TOKEN]

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int]:
        return NO_TOKEN if isinstance(tokens, str) else [NO_TOKEN] * len(tokens)

    def __len__(self) -> int:
        raise _unanswered("the size of its vocabulary")

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _unanswered(name)


def absent_processor(folder: str, *, trust_remote_code: bool) -> Any:
    """An object with the parts (`image_processor`, `feature_extractor`, ...) that the processor of a model has, as its class
    lists them; None if transformers knows no processor for the model."""
    from transformers import AutoConfig
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    found = PROCESSOR_MAPPING.get(type(config), None)
    if found is None:
        return None
    processor = _Part()
    for name in found.get_attributes():
        if name != "tokenizer":
            setattr(processor, name, _Part())
    return processor


class _Part:
    """A processor, or a part of one, that is not there."""


def _unanswered(what: str) -> EngineError:
    return EngineError(f"the model's constructor asks its tokenizer for {what}; a build has no tokenizer to answer")
