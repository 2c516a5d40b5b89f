"""Engine arguments: vLLM's own names, none that the build sets; only what shapes a contract is recorded."""

from __future__ import annotations

import pytest

from probe_cli.engines.vllm.arguments import LOAD_FORMATS, shaping_arguments, spelled
from probe_cli.errors import UsageError

KNOWN = ["quantization", "dtype", "kv_cache_dtype", "hf_overrides", "load_format", "speculative_config", "max_model_len"]


@pytest.mark.parametrize("given", ["kv-cache-dtype", "kv_cache_dtype", "--kv-cache-dtype"])
def test_any_spelling(given: str) -> None:
    assert spelled({given: "fp8"}, KNOWN) == {"kv_cache_dtype": "fp8"}


def test_an_unknown_argument_is_refused_and_the_closest_named() -> None:
    with pytest.raises(UsageError, match=r"--engine-arg quantisation: .* did you mean quantization\?"):
        spelled({"quantisation": "fp8"}, KNOWN)
    with pytest.raises(UsageError, match=r"no engine argument of that name$"):
        spelled({"zzz": 1}, KNOWN)


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("tensor-parallel-size", "--tp"),
        ("pipeline_parallel_size", "--pp"),
        ("data_parallel_size", "--dp"),
        ("enable_expert_parallel", "--ep"),
        ("model", "CHECKPOINT"),
        ("trust_remote_code", "--trust-remote-code"),
        ("distributed_executor_backend", "no executor runs in a build"),
    ],
)
def test_what_the_build_sets_cannot_be_given(name: str, flag: str) -> None:
    with pytest.raises(UsageError, match=f"--engine-arg {name}: set by .*{flag}"):
        spelled({name: 2}, [*KNOWN, name.replace("-", "_")])


@pytest.mark.parametrize("form", sorted(LOAD_FORMATS))
def test_formats_that_load_through_load_weights(form: str) -> None:
    assert spelled({"load_format": form}, KNOWN) == {"load_format": form}


@pytest.mark.parametrize("form", ["tensorizer", "sharded_state", "bitsandbytes", "gguf"])
def test_formats_that_do_not_are_refused(form: str) -> None:
    with pytest.raises(UsageError, match=f"load_format={form}: this format does not load layer by layer") as caught:
        spelled({"load-format": form}, KNOWN)
    assert "safetensors" in str(caught.value.hint)


def test_only_what_shapes_a_contract_is_recorded() -> None:
    given = {"quantization": "fp8", "max_model_len": 4096, "gpu_memory_utilization": 0.9, "dtype": "bfloat16"}
    assert shaping_arguments(given, "main") == {"dtype": "bfloat16", "quantization": "fp8"}
    assert shaping_arguments(given, "draft") == {"dtype": "bfloat16", "quantization": "fp8", "role": "draft"}


def test_the_order_of_flags_does_not_show() -> None:
    one = shaping_arguments({"dtype": "half", "quantization": "fp8"}, "main")
    other = shaping_arguments({"quantization": "fp8", "dtype": "half"}, "main")
    assert list(one.items()) == list(other.items())
