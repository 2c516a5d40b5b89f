"""What the small configurations change beside depths, where the class's defaults are no model that could be served."""

from __future__ import annotations

from typing import Any

__all__ = ["CHANGES"]

#: Architecture -> arguments for its configuration class; nested dictionaries are for its parts.
CHANGES: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {"score_func": "sigmoid"},
    "DeepseekV2ForCausalLM": {"n_group": 1, "topk_group": 1},
    "DeepseekV32ForCausalLM": {"topk_method": "noaux_tc"},
    "DeepseekV3ForCausalLM": {"topk_method": "noaux_tc"},
    "FalconForCausalLM": {"hidden_size": 4096, "num_attention_heads": 64},
    "Gemma3nForCausalLM": {"num_hidden_layers": 35},
}
