"""What the small configurations change beside depths, where the class's defaults are no model that could be served."""

from __future__ import annotations

from typing import Any

__all__ = ["CHANGES"]

#: Architecture -> arguments for its configuration class; nested dictionaries are for its parts.
CHANGES: dict[str, dict[str, Any]] = {
    "XLMRobertaModel": {"position_embedding_type": "absolute"},
    "Qwen3VLMoeForConditionalGeneration": {"text_config": {"norm_topk_prob": True}},
    "GlmMoeDsaForCausalLM": {"topk_method": "noaux_tc"},
    "Gemma4UnifiedForConditionalGeneration": {"text_config": {"num_hidden_layers": 6}, "vision_config": {}},
    "Gemma4ForConditionalGeneration": {"text_config": {"num_hidden_layers": 6}, "vision_config": {}},
    "HunYuanVLForConditionalGeneration": {"text_config": {"head_dim": 128, "use_qk_norm": False}},
    "Lfm2VlForConditionalGeneration": {
        "text_config": {"block_dim": 2560, "block_ff_dim": 12288, "block_multiple_of": 256}
    },
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "NemotronForCausalLM": {"num_key_value_heads": 8},
    "Ernie4_5_VLMoeForConditionalGeneration": {"vision_config": {"embed_dim": 1280, "mlp_ratio": 4}},
    "MiniMaxM2ForCausalLM": {"rotary_dim": 64, "scoring_func": "sigmoid", "use_routing_bias": True},
    "MiMoV2FlashForCausalLM": {
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "layernorm_epsilon": 1e-5,
        "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 8,
        "swa_head_dim": 192,
        "swa_v_head_dim": 128,
        "swa_rope_theta": 10000.0,
        "sliding_window_size": 128,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "attention_value_scale": 1.0,
    },
    "MuseSparkForConditionalGeneration": {"text_config": {"num_shared_experts": 0, "num_hidden_layers": 4}},
    "NomicBertModel": {
        "activation_function": "swiglu",
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "qkv_proj_bias": False,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_base": 1000,
        "rotary_emb_interleaved": False,
        "n_inner": 3072,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 4,
        "n_positions": 2048,
        "max_trained_positions": 2048,
        "layer_norm_epsilon": 1e-12,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "prenorm": False,
        "use_rms_norm": False,
        "parallel_block": False,
        "moe_every_n_layers": 0,
    },
    "LongcatFlashForCausalLM": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"},
    "Glm4MoeLiteForCausalLM": {"first_k_dense_replace": 1},
    "Glm4vMoeForConditionalGeneration": {"text_config": {"head_dim": 128, "use_qk_norm": False}},
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "AfmoeForCausalLM": {
        "score_func": "sigmoid",
        "route_norm": True,
        "route_scale": 1.0,
        "n_group": 1,
        "topk_group": 1,
    },
    "DeepseekV2ForCausalLM": {"n_group": 1, "topk_group": 1, "moe_intermediate_size": 1408},
    "DeepseekV32ForCausalLM": {"topk_method": "noaux_tc"},
    "DeepseekV3ForCausalLM": {"topk_method": "noaux_tc"},
    "FalconForCausalLM": {"hidden_size": 4096, "num_attention_heads": 64},
    "GteModel": {"position_embedding_type": "rope"},
    "HYV3ForCausalLM": {"first_k_dense_replace": 1, "expert_hidden_dim": 1536, "route_norm": True},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 128},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 128},
    "InklingForCausalLM": {"padded_vocab_size": 201024},
    "Lfm2ForCausalLM": {
        "block_dim": 2560,
        "block_ff_dim": 12288,
        "block_multiple_of": 256,
        "block_auto_adjust_ff_dim": True,
    },
    "Gemma3nForCausalLM": {"num_hidden_layers": 35},
}
