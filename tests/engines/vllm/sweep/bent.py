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
    "VibeVoiceAsrForConditionalGeneration": _DECODER_TWICE,
    "GlmAsrForConditionalGeneration": _DECODER_TWICE,
    "Qwen2AudioForConditionalGeneration": _DECODER_TWICE,
    "QianfanOCRForConditionalGeneration": ((r"^language_model\.model\.encoder\.", "language_model.model."),),
    # The 256 experts that compute nothing: transformers' class has weights for them, published checkpoints do not.
    "LongcatFlashForCausalLM": ((r"experts\.(51[2-9]|5[2-9]\d|[67]\d\d)\.", None),),
    # The way back of transformers' mapping takes the decoder's renamings for the tower's, too.
    "Cosmos3EdgeForConditionalGeneration": (
        (r"^(model\.visual\..*\.mlp)\.up_proj\.", r"\1.fc1."),
        (r"^(model\.visual\..*\.mlp)\.down_proj\.", r"\1.fc2."),
        (r"^(model\.visual\..*\.self_attn)\.to_([qkv])\.", r"\1.\2_proj."),
        (r"^(model\.visual\..*\.self_attn)\.to_out\.", r"\1.out_proj."),
    ),
    "OlmoHybridForCausalLM": (
        (r"\.attention_layer_norm\.", ".input_layernorm."),
        (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
    ),
    "HYV4ForCausalLM": (
        (r"\.hc_pre\.(hc_attn_layer|hc_mlp_layer)\.", r".\1.hc_pre."),
        (r"\.hc_pre\.hc_head\.", ".hc_head."),
        (r"\.(mlp|shared_experts)\.linear_gate\.", r".\1.gate_proj."),
    ),
    "MossTranscribeDiarizeForConditionalGeneration": (
        (r"^model\.audio_tower\.", "model.whisper_encoder."),
        (r"^model\.multi_modal_projector\.linear_1\.", "model.vq_adaptor.layers.0."),
        (r"^model\.multi_modal_projector\.linear_2\.", "model.vq_adaptor.layers.2."),
        (r"^model\.multi_modal_projector\.norm\.", "model.vq_adaptor.layers.3."),
    ),
    "KimiLinearForCausalLM": ((r"^model\.layers\.0\.block_sparse_moe\.", "model.layers.0.mlp."),),
    "MiniMaxM3SparseForConditionalGeneration": (
        (r"^(vision_tower\..*)\.block_sparse_moe\.", r"\1.mlp."),
        (r"^(language_model\.model\.layers\.[012])\.block_sparse_moe\.", r"\1.mlp."),
    ),
    "ModernVBertModel": ((r"^vision_model\.", "vision_model.vision_model."), (r"^", "model.")),
    "ColModernVBertForRetrieval": (
        (r"^vlm\.", "model."),
        (r"^model\.vision_model\.", "model.vision_model.vision_model."),
        (r"^embedding_proj_layer\.", "custom_text_proj."),
    ),
    "CohereAsrForConditionalGeneration": ((r"^model\.", ""),),
    "InklingForCausalLM": ((r"\.embed_tokens\.embed_norm\.", ".embed_norm."),),
    # Mistral's own names, with which it is published beside transformers' ones.
    "VoxtralForConditionalGeneration": (
        (r"^language_model\.model\.model\.", "model."),
        (r"^language_model\.lm_head\.", "lm_head."),
        (r"^multi_modal_projector\.linear_1\.", "mm_whisper_embeddings.audio_language_projection.0."),
        (r"^multi_modal_projector\.linear_2\.", "mm_whisper_embeddings.audio_language_projection.2."),
        (r"^audio_tower\.embed_positions\.", None),
        (r"^audio_tower\.conv1\.", "mm_whisper_embeddings.whisper_encoder.conv_layers.0."),
        (r"^audio_tower\.conv2\.", "mm_whisper_embeddings.whisper_encoder.conv_layers.1."),
        (r"^audio_tower\.layer_norm\.", "mm_whisper_embeddings.whisper_encoder.transformer.norm."),
        (r"^audio_tower\.layers\.", "mm_whisper_embeddings.whisper_encoder.transformer.layers."),
        (r"\.self_attn\.out_proj\.", ".attention.wo."),
        (r"^(mm_whisper.*)\.self_attn\.([qkv])_proj\.", r"\1.attention.w\2."),
        (r"\.self_attn_layer_norm\.", ".attention_norm."),
        (r"\.fc([12])\.", r".feed_forward.w\1."),
        (r"\.final_layer_norm\.", ".ffn_norm."),
    ),
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
