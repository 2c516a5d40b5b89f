"""Names that transformers saves otherwise than vLLM reads them: bent here, and said so on the page.

What passes that way proves the replay of such a load, not that a checkpoint saved by transformers could be served.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.engines.vllm.sweep.header_only import Entry

__all__ = ["BENT", "bend", "told"]

#: (pattern, replacement); None leaves the tensors out.
Rules = tuple[tuple[str, "str | None"], ...]

_DECODER_TWICE: Rules = ((r"^language_model\.model\.model\.", "language_model.model."),)
BENT: dict[str, Rules] = {
    "AudioFlamingo3ForConditionalGeneration": _DECODER_TWICE,
    "GlmAsrForConditionalGeneration": _DECODER_TWICE,
    "Qwen2AudioForConditionalGeneration": _DECODER_TWICE,
    "QianfanOCRForConditionalGeneration": ((r"^language_model\.model\.encoder\.", "language_model.model."),),
    # The 256 experts that compute nothing: transformers' class has weights for them, published checkpoints do not.
    "LongcatFlashForCausalLM": ((r"experts\.(51[2-9]|5[2-9]\d|[67]\d\d)\.", None),),
    "DeepseekV4ForCausalLM": (
        (r"^model\.hc_head\.hc_", "hc_head_"),
        (r"^model\.", ""),
        (r"^embed_tokens\.", "embed."),
        (r"\.attn\.norm\.", ".attn.kv_norm."),
    ),
}


def bend(rules: Rules) -> Callable[[list[Entry]], list[Entry]]:
    """A function that applies the rules, in order, to every name."""

    def bent(entries: list[Entry]) -> list[Entry]:
        result: list[Entry] = []
        for entry in entries:
            name = _name(entry[0], rules)
            if name is not None:
                result.append((name, *entry[1:]))
        return result

    return bent


def told(rules: Rules) -> str:
    """The rules as a note."""
    parts = [f"without {pattern}" if new is None else f"{pattern} -> {new or '(nothing)'}" for pattern, new in rules]
    return "names bent: " + ", ".join(part.replace("\\", "") for part in parts)


def _name(name: str, rules: Rules) -> str | None:
    for pattern, new in rules:
        if new is None:
            if re.search(pattern, name):
                return None
        else:
            name = re.sub(pattern, new, name)
    return name
