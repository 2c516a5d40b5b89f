"""The cases of the sweep: the registry's architectures, and quantizations and topologies of a few of them."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from probe_cli.topology import Topology
from tests.engines.vllm.sweep.bent import BENT, bend, told
from tests.engines.vllm.sweep.case import Case
from tests.engines.vllm.sweep.changes import CHANGES
from tests.engines.vllm.sweep.header_only import Entry, write_checkpoint
from tests.engines.vllm.sweep.published import OWN_CODE, write_own_code
from tests.engines.vllm.sweep.quantized import CONFIGS, LAYOUTS, left_whole, quantize, with_kv_scales
from tests.engines.vllm.sweep.small_models import config_and_entries

__all__ = ["architecture_cases", "registered_names", "special_cases"]


def architecture_cases(names: Iterable[str]) -> list[Case]:
    """One case for each architecture: TP2, rank 1; experts spread where there are any."""
    return [_architecture_case(name) for name in names]


def _architecture_case(name: str) -> Case:
    arguments: dict[str, Any] = {"dtype": "bfloat16"}
    if name.endswith("Model"):
        # vLLM takes a bare decoder for a text generator unless it is told that it embeds.
        arguments["runner"] = "pooling"
    if name in ONE_RANK:
        return Case(name, _maker(name), Topology(), 0, arguments=arguments, bent=ONE_RANK[name])
    own_code = name in OWN_CODE
    if name in DRAFTERS:
        return _drafter_case(name, DRAFTERS[name])
    if name in BENT:
        rules = BENT[name]
        maker = _maker(name, more=bend(rules))
        return Case(name, maker, arguments=arguments, spread=True, bent=told(rules), own_code=own_code)
    if name in TRANSPOSED:
        maker = _maker(name, more=_transposed)
        return Case(name, maker, arguments=arguments, spread=True, bent="experts transposed, as published")
    published = Case(
        name,
        _maker(name, prefixes=True),
        arguments=arguments,
        spread=True,
        bent="with the published prefixes",
        own_code=own_code,
    )
    return Case(name, _maker(name), arguments=arguments, spread=True, otherwise=published, own_code=own_code)


#: Drafters with a checkpoint of their own: the method, and the model that they draft for.
DRAFTERS = {"MuseGlimmerAssistantModel": ("dflash", "MuseGlimmerForConditionalGeneration")}


def _drafter_case(name: str, drafts: tuple[str, str]) -> Case:
    method, main = drafts

    def make(folder: Path) -> None:
        _maker(name)(folder)
        config, _ = config_and_entries(main, CHANGES.get(main, {}))
        write_checkpoint(folder / "main", config, [])

    speculative = {"method": method, "model": "{folder}", "num_speculative_tokens": 4}
    arguments = {"dtype": "bfloat16", "hf_config_path": "{folder}/main", "speculative_config": speculative}
    return Case(name, make, role="draft", arguments=arguments)


#: Experts that transformers saves the other way round than they were published, and than vLLM reads them.
TRANSPOSED = frozenset({"Qwen3VLMoeForConditionalGeneration"})


def _transposed(entries: list[Entry]) -> list[Entry]:
    return [
        (name, dtype, (shape[0], shape[2], shape[1]))
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))
        else (name, dtype, shape)
        for name, dtype, shape in entries
    ]


def registered_names() -> list[str]:
    """The architectures of vLLM's registry, sorted: read from its source, since vLLM must not be imported before a fork."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0], "model_executor/models/registry.py").read_text()
    return sorted(set(re.findall(r'^    "(\w+)": \(', source, re.MULTILINE)))


#: Probed at TP1, and why.
ONE_RANK = {
    "BertForMaskedLM": "TP1: at TP2 vLLM's own loading fails (the decoder takes the whole embedding)",
}


def _maker(
    architecture: str,
    changes: Mapping[str, Any] | None = None,
    layout: str = "",
    *,
    more: Callable[[list[Entry]], list[Entry]] | None = None,
    ones: bool = False,
    prefixes: bool = False,
) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        given = {**CHANGES.get(architecture, {}), **(changes or {})}
        config, entries = config_and_entries(architecture, given, prefixes=prefixes)
        if more is not None:
            entries = more(entries)
        if layout:
            entries = quantize(entries, LAYOUTS[layout])
            config["quantization_config"] = {**CONFIGS[layout], **left_whole(layout, entries)}
        write_checkpoint(folder, config, entries, ones=ones)
        if architecture in OWN_CODE:
            write_own_code(folder)

    return make


_LLAMA = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4}
_QWEN_MOE = {"num_experts": 16, "moe_intermediate_size": 512, "num_experts_per_tok": 4}
_MLA = {
    "num_hidden_layers": 4, "first_k_dense_replace": 1, "n_routed_experts": 16, "n_group": 4, "topk_group": 2,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
_DRAFT = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}


#: Layouts that need another target.
_OTHERS = ("nvfp4",)


def special_cases() -> list[Case]:
    tp2, ep2 = Topology(tp=2), Topology(tp=2, ep=2)
    llama, moe, mla = "LlamaForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"
    cases = [Case(f"Llama {layout}", _maker(llama, _LLAMA, layout)) for layout in LAYOUTS if layout not in _OTHERS]
    cases += [
        Case(f"Qwen3-MoE {layout}, EP2", _maker(moe, _QWEN_MOE, layout), ep2)
        for layout in ("block_fp8", "compressed_fp8", "compressed_w4a16", "gptq", "awq")
    ]
    cases += [
        Case(
            "Qwen3-MoE static_fp8, EP2",
            _maker(moe, _QWEN_MOE, "static_fp8", ones=True),
            ep2,
            bent="with data: the loader of input scales compares values",
        ),
        Case("Llama nvfp4, B200", _maker(llama, _LLAMA, "nvfp4"), target="b200"),
        Case("Qwen3-MoE nvfp4, EP2, B200", _maker(moe, _QWEN_MOE, "nvfp4"), ep2, target="b200"),
        Case(
            "Llama block_fp8 with KV scales",
            _maker(llama, _LLAMA, "block_fp8", more=with_kv_scales),
            arguments={"kv_cache_dtype": "fp8"},
        ),
        Case("Llama online FP8", _maker(llama, _LLAMA), arguments={"quantization": "fp8"}),
        Case("Qwen3-MoE online FP8, EP2", _maker(moe, _QWEN_MOE), ep2, arguments={"quantization": "fp8"}),
        Case("Llama PP2", _maker(llama, _LLAMA), Topology(pp=2)),
        Case("Llama TP2 PP2", _maker(llama, _LLAMA), Topology(tp=2, pp=2), 3),
        Case("Qwen3-MoE TP2", _maker(moe, _QWEN_MOE), tp2),
        Case("Qwen3-MoE TP2 EP2", _maker(moe, _QWEN_MOE), ep2),
        Case("Qwen3-MoE TP2 PP2 EP2", _maker(moe, _QWEN_MOE), Topology(tp=2, pp=2, ep=2), 3),
        Case("Qwen3-MoE DP4 EP4 (wide EP)", _maker(moe, _QWEN_MOE), Topology(dp=4, ep=4), 2),
        Case("Qwen3-MoE DP2 TP2 EP4", _maker(moe, _QWEN_MOE), Topology(tp=2, dp=2, ep=4), 3),
        Case(
            "Qwen3-MoE EP4, round robin",
            _maker(moe, _QWEN_MOE),
            Topology(tp=4, ep=4),
            1,
            arguments={"expert_placement_strategy": "round_robin"},
        ),
        Case(
            "DeepSeek-V3 EPLB, 4 redundant experts",
            _maker(mla, _MLA),
            Topology(tp=4, ep=4),
            1,
            arguments={"enable_eplb": True, "eplb_config": {"num_redundant_experts": 4}},
        ),
        Case("DeepSeek-V3 block_fp8, TP2", _maker(mla, _MLA, "block_fp8"), tp2),
        Case("DeepSeek-V3 block_fp8, EP2", _maker(mla, _MLA, "block_fp8"), ep2),
        Case(
            "DeepSeek-V3 block_fp8, MTP drafter",
            _maker(mla, _MLA, "block_fp8", more=_with_mtp),
            ep2,
            role="draft",
            arguments=_DRAFT,
            bent="the drafter's layer is made here: transformers does not save it",
        ),
        Case(
            "DeepSeek-V3 DP72 EP72 (wide EP)",
            _maker(mla, {**_MLA, "n_routed_experts": 144, "n_group": 8}),
            Topology(dp=72, ep=72),
            71,
        ),
        Case("GPT-OSS MXFP4, TP2", _mxfp4, tp2),
        Case("GPT-OSS MXFP4, EP2", _mxfp4, ep2),
        Case("GPT-OSS bf16, EP2", _maker("GptOssForCausalLM", {"num_local_experts": 8}), ep2),
        Case("Mixtral EP2", _maker("MixtralForCausalLM"), ep2),
        Case("Llama A100", _maker(llama, _LLAMA), target="a100"),
    ]
    return cases


def _with_mtp(entries: list[Entry]) -> list[Entry]:
    """Add DeepSeek-V3's multi-token-prediction layer: one more layer like the last, with the tensors that join it."""
    last = max(int(name.split(".")[2]) for name, _, _ in entries if name.startswith("model.layers."))
    embedding = next(shape for name, _, shape in entries if name == "model.embed_tokens.weight")
    layer = f"model.layers.{last + 1}"
    result = list(entries)
    for name, dtype, shape in entries:
        if name.startswith(f"model.layers.{last}."):
            result.append((layer + name.removeprefix(f"model.layers.{last}"), dtype, shape))
    hidden = embedding[1]
    return [
        *result,
        (f"{layer}.embed_tokens.weight", "BF16", embedding),
        (f"{layer}.enorm.weight", "BF16", (hidden,)),
        (f"{layer}.hnorm.weight", "BF16", (hidden,)),
        (f"{layer}.eh_proj.weight", "BF16", (hidden, 2 * hidden)),
        (f"{layer}.shared_head.head.weight", "BF16", embedding),
        (f"{layer}.shared_head.norm.weight", "BF16", (hidden,)),
    ]


def _mxfp4(folder: Path) -> None:
    """GPT-OSS as published: experts as blocks of 16 bytes (32 values) with a shared exponent."""
    config, entries = config_and_entries("GptOssForCausalLM", {"num_local_experts": 8})
    result: list[Entry] = []
    for name, dtype, shape in entries:
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inner, out = shape
            result.append((f"{name}_blocks", "U8", (experts, out, inner // 32, 16)))
            result.append((f"{name}_scales", "U8", (experts, out, inner // 32)))
        else:
            result.append((name, dtype, shape))
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    write_checkpoint(folder, config, result)
