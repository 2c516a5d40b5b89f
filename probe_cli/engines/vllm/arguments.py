"""vLLM's engine arguments as the user gives them: which are taken, which the build sets itself, which shape a contract."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from probe_cli.errors import UsageError

__all__ = ["LOAD_FORMATS", "shaping_arguments", "spelled"]

#: Set by the build: flags of its own say these.
_OWN = {
    "tensor_parallel_size": "--tp",
    "pipeline_parallel_size": "--pp",
    "data_parallel_size": "--dp",
    "enable_expert_parallel": "--ep",
    "model": "CHECKPOINT",
    "revision": "--revision",
    "trust_remote_code": "--trust-remote-code",
    "distributed_executor_backend": "nothing: no executor runs in a build",
}

#: Steer serving, never a load.
_IDLE = frozenset(
    {
        "gpu_memory_utilization", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "seed", "swap_space",
        "disable_log_stats", "enforce_eager", "served_model_name", "enable_prefix_caching", "enable_chunked_prefill",
        "num_gpu_blocks_override", "max_logprobs", "tokenizer", "tokenizer_mode", "skip_tokenizer_init", "download_dir",
    }
)  # fmt: skip

#: Formats whose loader feeds `load_weights` with checkpoint tensors by name.
LOAD_FORMATS = frozenset({"auto", "hf", "safetensors", "fastsafetensors", "runai_streamer", "dummy", "mistral"})


def spelled(arguments: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """The arguments under vLLM's own names (`kv-cache-dtype` is `kv_cache_dtype`).

    Raises UsageError for one that vLLM does not have, or that a flag of the build sets.
    """
    names = set(known)
    result: dict[str, Any] = {}
    for given, value in arguments.items():
        name = given.lstrip("-").replace("-", "_")
        if name in _OWN:
            raise UsageError(f"--engine-arg {given}: set by {_OWN[name]}")
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise UsageError(f"--engine-arg {given}: vLLM has no engine argument of that name{meant}")
        if name == "load_format" and value not in LOAD_FORMATS:
            raise UsageError(
                f"--engine-arg load_format={value}: this format does not load layer by layer through load_weights",
                hint=f"formats that do: {', '.join(sorted(LOAD_FORMATS))}",
            )
        result[name] = value
    return result


def shaping_arguments(arguments: Mapping[str, Any], role: str) -> dict[str, Any]:
    """What the manifest records: the arguments that can shape a contract, and the role if it is not the main model."""
    shaping = {name: value for name, value in sorted(arguments.items()) if name not in _IDLE}
    return shaping if role == "main" else {**shaping, "role": role}
