"""What a published config.json says otherwise than the one that transformers' class writes: vLLM reads the published fields."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["OWN_CODE", "PUBLISHED", "as_published", "write_own_code"]

_LAYERS = 4

#: Architecture -> what is put over config.json, part by part; None takes a field out.
PUBLISHED: dict[str, dict[str, Any]] = {
    "KimiLinearForCausalLM": {
        "mla_use_nope": True,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "num_expert_group": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
        },
    },
    "Step3p7ForConditionalGeneration": {
        "text_config": {
            "architectures": ["Step3p5ForCausalLM"], "use_moe": True, "use_moe_router_bias": True, "need_fp32_gate": True,
            "norm_expert_weight": True, "moe_router_activation": "sigmoid", "moe_layers_enum": "3",
            "use_head_wise_attn_gate": True,
        },
        "vision_config": {
            "hidden_act": "quick_gelu", "width": 1536, "layers": _LAYERS, "heads": 16, "mlp_ratio": 8960 / 1536,
            "output_dim": None, "ls_init_value": 0.1, "use_abs_posemb": True, "use_cls_token": False, "use_rope2d": True,
            "use_ln_pre": True, "use_ln_post": False,
        },
    },
    "MiniMaxM3SparseForConditionalGeneration": {
        "vision_config": {"img_token_compression_config": {"spatial_merge_size": 2, "temporal_patch_size": 2}},
        "text_config": {
            "hidden_act": "swigluoai",
            "moe_layer_freq": [0, 0, 0, 1],
            "sparse_attention_config": {
                "use_sparse_attention": True, "sparse_index_dim": 128, "sparse_num_index_heads": 4,
                "sparse_topk_blocks": 16, "sparse_block_size": 128, "sparse_disable_index_value": [0, 0, 0, 1],
                "sparse_score_type": "max", "sparse_init_block": 0, "sparse_local_block": 1,
                "sparse_attention_freq": [0, 0, 0, 1],
            },
        },
    },
    "Glm5NextForConditionalGeneration": {
        "text_config": {
            "mhc": True, "mla_use_nope": True, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
            "indexer_rope_interleave": True,
        },
    },
    "InklingForCausalLM": {
        "model_type": "inkling_model",
        "use_embed_norm": True,
        "use_sconv": True,
        "use_gate_bias": True,
        "use_global_scale": True,
        "dense_mlp_idx": 1,
    },
    "VoxtralForConditionalGeneration": {
        "audio_config": {
            "downsample_factor": 4, "is_causal": False, "window_size": 400, "hop_length": 160, "sampling_rate": 16000,
        },
    },
    "CohereAsrForConditionalGeneration": {
        "encoder": {
            "feat_in": 128, "feat_out": -1, "n_layers": _LAYERS, "d_model": 1280, "n_heads": 8, "ff_expansion_factor": 4,
            "causal_downsampling": False, "subsampling": "dw_striding", "subsampling_factor": 8,
            "subsampling_conv_channels": 256, "subsampling_conv_chunking_factor": 1, "self_attention_model": "rel_pos",
            "att_context_size": [-1, -1], "xscaling": False, "untie_biases": True, "pos_emb_max_len": 5000,
            "conv_kernel_size": 9, "conv_norm_type": "batch_norm", "conv_context_size": None,
        },
        "transf_decoder": {
            "config_dict": {
                "hidden_size": 1024, "inner_size": 4096, "num_attention_heads": 8, "num_layers": _LAYERS,
                "hidden_act": "relu", "max_sequence_length": 1024, "pre_ln": True, "learn_positional_encodings": False,
            },
        },
        "head": {"num_classes": 16384, "hidden_size": 1024},
    },
    "Molmo2ForConditionalGeneration": {
        "vit_config": {
            "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
            "num_key_value_heads": 16, "head_dim": 72, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
            "image_default_input_size": [378, 378], "image_patch_size": 14, "image_num_pos": 729,
        },
        "adapter_config": {"vit_layers": [-3, -9], "pooling_attention_mask": True},
        "text_config": {
            "qkv_bias": False, "use_qk_norm": True, "layer_norm_eps": 1e-6, "rope_theta": 1000000.0,
        },
    },
    "NemotronH_Omni_Reasoning_V3": {
        "patch_size": 16, "template": "nemotron", "ps_version": "v2", "image_tag_type": "internvl", "vit_hidden_size": 1280,
        "force_image_size": 512, "text_config": {"dtype": "bfloat16"},
        "vision_config": {"args": {"model": "vit_huge_patch16_224", "cpe_max_size": 2048, "register_multiple": 10}},
        "norm_mean": [0.48, 0.46, 0.41], "norm_std": [0.27, 0.26, 0.28],
    },
}  # fmt: skip

#: Transformers' own configuration class renames fields that vLLM reads: published checkpoints come with a class of their own,
#: and are served with `--trust-remote-code`.
OWN_CODE = frozenset(
    {"Molmo2ForConditionalGeneration", "NemotronH_Omni_Reasoning_V3", "Step3p7ForConditionalGeneration"}
)
_MODULE = "configuration_as_published"
_CLASS = """from transformers import AutoConfig, PreTrainedConfig


class AsPublished(PreTrainedConfig):
    model_type = "as_published"

    def __init__(self, **fields):
        for name, value in fields.items():
            if name.endswith("_config") and isinstance(value, dict):
                known = name == "text_config" and value.get("model_type") in KEPT
                fields[name] = AutoConfig.for_model(**value) if known else PreTrainedConfig(**value)
        super().__init__(**fields)


KEPT = {"nemotron_h", "step3p5"}
"""


def write_own_code(folder: Path) -> None:
    """The class that `as_published` names in config.json: every part as it stands there."""
    (folder / f"{_MODULE}.py").write_text(_CLASS, encoding="utf-8")


def as_published(architecture: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json with what the published one says."""
    if architecture == "Ernie4_5_VLMoeForConditionalGeneration":
        return _ernie_vl(document)
    if architecture == "ColModernVBertForRetrieval":
        return {**document["vlm_config"], "architectures": [architecture], "embedding_dim": document["embedding_dim"]}
    result = _put_over(document, PUBLISHED.get(architecture, {}))
    if architecture in OWN_CODE:
        result |= {"model_type": "as_published", "auto_map": {"AutoConfig": f"{_MODULE}.AsPublished"}}
    return result


def _put_over(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(document)
    for name, value in changes.items():
        old = result.get(name)
        result[name] = _put_over(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _ernie_vl(document: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder's fields stand at the top, those of the vision tower have other names."""
    text, vision = dict(document["text_config"]), document["vision_config"]
    experts = text["moe_num_experts"]
    text.pop("model_type", None)
    last = text["num_hidden_layers"] - 1
    return {
        **document,
        **text,
        "moe_num_experts": [experts, experts],
        "moe_layer_start_index": [1, 1],
        "moe_layer_end_index": [last, last],
        "moe_layer_interval": 1,
        "pixel_hidden_size": vision["hidden_size"],
        "spatial_conv_size": 2,
        "temporal_conv_size": 2,
        "use_temporal_conv": True,
        "im_patch_id": document["image_token_id"],
        "vision_config": {**vision, "embed_dim": vision["hidden_size"], "mlp_ratio": 4},
    }
