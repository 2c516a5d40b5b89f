"""What the small configurations change beside depths, where the class's defaults are no model that could be served."""

from __future__ import annotations

from typing import Any

__all__ = ["CHANGES"]

#: Architecture -> arguments for its configuration class; nested dictionaries are for its parts.
CHANGES: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {"score_func": "sigmoid", "route_norm": True, "route_scale": 1.0},
    "DeepseekV2ForCausalLM": {"n_group": 1, "topk_group": 1},
    "DeepseekV32ForCausalLM": {"topk_method": "noaux_tc"},
    "DeepseekV3ForCausalLM": {"topk_method": "noaux_tc"},
    "FalconForCausalLM": {"hidden_size": 4096, "num_attention_heads": 64},
    "GteModel": {"position_embedding_type": "rope"},
    "HYV3ForCausalLM": {"first_k_dense_replace": 1},
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
