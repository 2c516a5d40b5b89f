"""A model that hears: the audio tower, the projector and the language model are one contract, built offline and updated live.

(Those that see need torchvision in vLLM 0.32, which has no release beside its torch for CPUs.)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from probe_cli.manifest import Manifest
from tests.engines.vllm_serving.serving import ENVIRONMENT, Served, serve
from tests.engines.vllm_serving.test_reload import tensors, without

pytestmark = pytest.mark.vllm

VOCABULARY = 256
SPECIAL = {"<|AUDIO|>": 250, "<|audio_bos|>": 251, "<|audio_eos|>": 252}
MISSING = ("audio_tower.layers.1.self_attn.k_proj.weight", "multi_modal_projector.linear.bias")


def make(folder: Path, seed: int) -> Path:
    """A small Qwen2-Audio with its processor, named as the published checkpoint is."""
    import torch
    import transformers
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    text = {
        "model_type": "qwen2", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 2048,
    }  # fmt: skip
    audio = {
        "model_type": "qwen2_audio_encoder", "d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 2,
        "encoder_ffn_dim": 128, "num_mel_bins": 80,
    }  # fmt: skip
    index = SPECIAL["<|AUDIO|>"]
    config = transformers.Qwen2AudioConfig(text_config=text, audio_config=audio, audio_token_index=index)
    model = transformers.Qwen2AudioForConditionalGeneration(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                parameter.normal_(1.0, 0.1)
            else:
                parameter.normal_(0.0, (4.0 if "lm_head" in name else 1.0) / parameter[0].numel() ** 0.5)
    model.save_pretrained(folder)
    nested = (
        "language_model.model.model."  # how transformers 5 saves it; published checkpoints and vLLM have one level less
    )
    named = {name.replace(nested, "language_model.model."): tensor for name, tensor in tensors(folder).items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    config_file = folder / "config.json"
    config_file.write_text(json.dumps({**json.loads(config_file.read_text()), "dtype": "bfloat16"}))
    _save_processor(folder)
    return folder


def _save_processor(folder: Path) -> None:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {number: word for word, number in SPECIAL.items()}
    vocabulary = {words.get(number, f"t{number}"): number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="t0",
        pad_token="t1",
        eos_token="t3",
        additional_special_tokens=list(SPECIAL),
    )
    transformers.Qwen2AudioProcessor(
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=80), tokenizer=fast
    ).save_pretrained(folder)


def hearing(folder: Path, manifest: str | None) -> Any:
    return serve(
        folder,
        manifest,
        skip_tokenizer_init=False,
        mm_processor_cache_gb=0,
        max_model_len=1024,
        max_num_batched_tokens=2048,
        limit_mm_per_prompt={"audio": 1},
    )


def heard(served: Served) -> tuple[list[list[int]], list[float]]:
    """What is said to a second of noise, and to text alone."""
    import numpy
    from vllm import SamplingParams

    noise = numpy.random.default_rng(0).normal(size=16000).astype(numpy.float32)
    audio = [SPECIAL["<|audio_bos|>"], SPECIAL["<|AUDIO|>"], SPECIAL["<|audio_eos|>"]]
    outputs = served.llm.generate(
        [
            {"prompt_token_ids": [5, 6, *audio, 7, 8], "multi_modal_data": {"audio": (noise, 16000)}},
            {"prompt_token_ids": list(range(5, 21))},
        ],
        SamplingParams(temperature=0, max_tokens=12, logprobs=1, detokenize=False),
        use_tqdm=False,
    )
    served.llm.reset_prefix_cache()
    served.llm.llm_engine.reset_encoder_cache()  # a reload clears the workers' cache, and leaves the scheduler's as it was
    return [list(o.outputs[0].token_ids) for o in outputs], [o.outputs[0].cumulative_logprob for o in outputs]


def state(served: Served) -> tuple[Any, dict[str, str]]:
    return heard(served), served.digests


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("audio")
    return make(root / "A", 1), make(root / "B", 2)


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path]) -> tuple[Any, dict[str, str]]:
    with hearing(folders[1], None) as cold:
        return state(cold)


@pytest.fixture(scope="module")
def served(folders: tuple[Path, Path], expected: Any) -> Iterator[Served]:
    with hearing(folders[0], "record") as engine:
        yield engine


def test_the_contract_is_the_one_built_offline(served: Served, folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Without a processor: the offline build is given headers and the configuration only."""
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).symlink_to(folders[0] / name)
    command = [
        sys.executable,
        "-m",
        "probe_cli",
        "build",
        str(bare),
        "--engine",
        "vllm",
        "-o",
        str(tmp_path / "bundle"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **ENVIRONMENT})
    assert done.returncode == 0, done.stderr[-3000:]
    assert Manifest.read(tmp_path / "bundle", 0).contract_digest == served.status["contract_digest"]


def test_tower_projector_and_language_model_are_updated(
    served: Served, folders: tuple[Path, Path], expected: Any
) -> None:
    first = state(served)
    assert all(old != new for old, new in zip(first[0][0], expected[0][0])), "both prompts are answered otherwise by B"
    served.reload(weights_path=str(folders[0]))
    assert state(served) == first
    served.reload(weights_path=str(folders[1]))
    assert state(served) == expected
    receipt = served.status["receipt"]
    assert receipt["unknown_sources"] == () and receipt["observed"] == receipt["expected"] >= len(tensors(folders[1]))


def test_what_the_tower_lacks_is_named(served: Served, folders: tuple[Path, Path], expected: Any) -> None:
    from probe_cli.errors import IncompleteUpdate

    with pytest.raises(IncompleteUpdate) as failure:
        served.reload(weights_iterator=without(folders[1], *MISSING))
    assert all(name in str(failure.value) for name in MISSING)
    served.reload(weights_path=str(folders[1]))
    assert state(served) == expected
