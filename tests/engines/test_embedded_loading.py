"""What the ranks hold after a real load, put together again, is the checkpoint: nothing lost, nothing doubled."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from probe_cli import Checkpoint, Topology
from probe_cli.engines.embedded.checkpoints import PRESETS, checkpoint_tensors, preset, write_checkpoint
from probe_cli.engines.embedded.config import ModelConfig
from probe_cli.engines.embedded.loading import build_model, forward_all, load_model, load_ranks, read_weights
from probe_cli.engines.embedded.model import CausalLM
from probe_cli.engines.embedded.parallel import ParallelContext
from probe_cli.errors import InputError, UsageError

TOKENS = torch.arange(12).reshape(1, 12) * 7 % 250
Ranks = list[CausalLM]


def opened(tmp_path: Path, name: str, **changes: object) -> Checkpoint:
    return Checkpoint.open(write_checkpoint(tmp_path / name, preset(name, **changes), seed=3))


def unprocessed(checkpoint: Checkpoint, topology: Topology) -> Ranks:
    return [load_model(checkpoint, ParallelContext(rank), process=False) for rank in topology.ranks()]


def tensor(model: CausalLM, name: str) -> torch.Tensor:
    return model.get_parameter(name).data


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(torch.uint8)


def reassemble(ranks: Ranks, name: str) -> torch.Tensor:
    """One checkpoint tensor from the parameters of all ranks: the routing, written the other way round."""
    config = ranks[0].config
    prefix, _, kind = name.rpartition(".")
    parent, _, part = prefix.rpartition(".")

    def parts(target: str, cut: Callable[[torch.Tensor], torch.Tensor], dim: int | None) -> torch.Tensor:
        found = []
        for model in ranks:
            if target in dict(model.named_parameters(remove_duplicate=False)):
                found.append(cut(tensor(model, target)))
        if dim is not None:
            return torch.cat(found, dim)
        for other in found:  # replicated: the same everywhere
            assert torch.equal(bits(other), bits(found[0]))
        return found[0]

    unit = config.block[0] if config.block and kind == "weight_scale_inv" else 1
    tp = ranks[0].context.tp_size
    if part in ("q_proj", "k_proj", "v_proj"):
        q = config.heads // tp * config.head_dim // unit
        kv = max(1, config.kv_heads // tp) * config.head_dim // unit
        start, size = {"q": (0, q), "k": (q, kv), "v": (q + kv, kv)}[part[0]]
        joined = parts(f"{parent}.qkv_proj.{kind}", lambda t: t.narrow(0, start, size), 0)
        copies = 1 if part == "q_proj" else max(1, tp // config.kv_heads)
        # Each head of size rows stands `copies` times in a row.
        return joined.unflatten(0, (-1, copies, size))[:, 0].flatten(0, 1) if copies > 1 else joined
    if ".experts." in name:
        stem, expert = parent.rsplit(".", 1)
        fused = ("w2" if part == "down_proj" else "w13") + kind.removeprefix("weight")
        pieces = []
        for model in ranks:
            owner = (
                model.model.layers[name.split(".")[2]].mlp.experts
                if f"{stem}.{fused}" in dict(model.named_parameters())
                else None
            )
            if owner is None or owner.local_of[int(expert)] < 0:
                continue
            whole = tensor(model, f"{stem}.{fused}")[owner.local_of[int(expert)]]
            pieces.append(whole if part == "down_proj" else whole.chunk(2)[0 if part == "gate_proj" else 1])
        return torch.cat(pieces, 1 if part == "down_proj" else 0)
    if part in ("gate_proj", "up_proj"):
        return parts(f"{parent}.gate_up_proj.{kind}", lambda t: t.chunk(2)[0 if part == "gate_proj" else 1], 0)
    if part in ("q_a_proj", "kv_a_proj"):
        first = part == "q_a_proj"
        return parts(
            f"{parent}.fused_qkv_a_proj.weight", lambda t: t[: config.q_rank] if first else t[config.q_rank :], None
        )
    if part == "kv_b_proj":
        halves = [parts(name, lambda t, half=half: t.chunk(2)[half], 0) for half in (0, 1)]
        copies, size = max(1, tp // config.kv_heads), max(1, config.kv_heads // tp) * config.head_dim
        return torch.cat([half.unflatten(0, (-1, copies, size))[:, 0].flatten(0, 1) for half in halves])
    if part in ("embed_tokens", "lm_head"):
        owners = [m for m in ranks if name in dict(m.named_parameters())]
        owners = [m for m in owners if m.context.rank.pp == owners[0].context.rank.pp]
        return torch.cat([tensor(m, name) for m in owners])[: config.vocab_size]
    if part in ("o_proj", "down_proj"):
        return parts(name, lambda t: t, None if kind == "bias" else 1)
    if kind == "sinks" or part == "q_b_proj":
        return parts(name, lambda t: t, 0)
    if kind == "decay":
        return torch.log(-parts(name, lambda t: t, 0))
    return parts(name, lambda t: t, None)


CASES = [
    *((name, Topology(tp=2, ep=2 if "moe" in name else 1)) for name in PRESETS),
    ("llama", Topology(tp=4)),
    ("llama-fp8", Topology(tp=4)),
    ("llama-tied", Topology(pp=2)),
    ("qwen3-moe", Topology(tp=2)),
    ("qwen3-moe-extras", Topology(tp=4, ep=2)),
    ("qwen3-moe-fp8", Topology(tp=2, pp=2)),
    ("qwen3-moe", Topology(tp=2, pp=2, ep=2)),
]


@pytest.mark.parametrize(("name", "topology"), CASES, ids=str)
def test_ranks_put_together_are_the_checkpoint(tmp_path: Path, name: str, topology: Topology) -> None:
    checkpoint = opened(tmp_path, name)
    ranks = unprocessed(checkpoint, topology)
    for source, expected in read_weights(checkpoint):
        if source.endswith(".decay"):
            torch.testing.assert_close(reassemble(ranks, source), expected, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(bits(reassemble(ranks, source)), bits(expected)), source


@pytest.mark.parametrize(("name", "topology"), CASES, ids=str)
def test_logits_of_all_ranks_are_those_of_one(tmp_path: Path, name: str, topology: Topology) -> None:
    checkpoint = opened(tmp_path, name)
    expected = load_model(checkpoint)(TOKENS)
    assert expected.std() > 0.5
    actual = forward_all(load_ranks(checkpoint, topology), TOKENS)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_padding_rows_stay_as_they_were_made(tmp_path: Path) -> None:
    """250 rows over two ranks are 2 x 128: the last six are nobody's."""
    _, last = unprocessed(opened(tmp_path, "llama"), Topology(tp=2))
    weight = tensor(last, "model.embed_tokens.weight")
    assert weight.shape == (128, 64)
    assert torch.equal(weight[122:], torch.zeros(6, 64))
    assert (weight[:122].abs().sum(1) > 0).all()


def test_tied_head_is_the_embedding_and_a_written_copy_is_ignored(tmp_path: Path) -> None:
    model = load_model(opened(tmp_path, "llama-tied"))
    before = model.lm_head.weight.clone()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.load_weights([("lm_head.weight", torch.ones(250, 64))]) == set()
    assert torch.equal(model.lm_head.weight, before)


def test_biases_of_every_kind_equal_transformers(tmp_path: Path) -> None:
    """A row-parallel bias is added once, after the sum over ranks."""
    transformers = pytest.importorskip("transformers")
    checkpoint = opened(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoint.root, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(TOKENS).logits
    torch.testing.assert_close(load_model(checkpoint)(TOKENS), expected, rtol=1e-4, atol=1e-4)
    actual = forward_all(load_ranks(checkpoint, Topology(tp=2)), TOKENS)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "linear", "factor": 4.0},
    ],
)
def test_stretched_positions_equal_transformers(tmp_path: Path, rope: dict[str, object]) -> None:
    transformers = pytest.importorskip("transformers")
    if rope["rope_type"] == "llama3":
        rope = {**rope, "original_max_position_embeddings": 32}
    checkpoint = opened(tmp_path, "llama", rope_scaling=rope)
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoint.root, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(TOKENS).logits
    torch.testing.assert_close(load_model(checkpoint)(TOKENS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Qwen3Moe"])
def test_a_checkpoint_that_transformers_wrote(tmp_path: Path, kind: str) -> None:
    """Releases from 5 on may write `num_local_experts` and `rope_parameters`: not seen, every expert would be lost."""
    transformers = pytest.importorskip("transformers")
    name = {"Llama": "llama", "Qwen3": "qwen3", "Qwen3Moe": "qwen3-moe"}[kind]
    known = {key: value for key, value in PRESETS[name].items() if key not in ("architectures", "torch_dtype")}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**known, "rope_theta": 5000.0})
    reference = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    reference.save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    model = build_model(checkpoint)
    assert model.load_weights(read_weights(checkpoint)) == set(checkpoint.names())
    with torch.no_grad():
        expected = reference(TOKENS).logits
    torch.testing.assert_close(load_model(checkpoint)(TOKENS), expected, rtol=1e-4, atol=1e-4)


def test_all_experts_in_one_tensor_load_as_one_by_one() -> None:
    """Case 26: a trainer sends fused experts, the files have them one by one."""
    config = preset("qwen3-moe")
    single = dict(checkpoint_tensors(config, 1))
    fused: dict[str, torch.Tensor] = {}
    for name, value in single.items():
        if ".experts." not in name:
            fused[name] = value
    for layer in range(2):
        stem = f"model.layers.{layer}.mlp.experts"

        def stack(part: str, stem: str = stem) -> torch.Tensor:
            return torch.stack([single[f"{stem}.{expert}.{part}.weight"] for expert in range(8)])

        fused[f"{stem}.gate_up_proj"] = torch.cat([stack("gate_proj"), stack("up_proj")], 1)
        fused[f"{stem}.down_proj"] = stack("down_proj")
    context = ParallelContext(Topology(tp=2, ep=2).rank(1))
    one, other = CausalLM(config, context), CausalLM(config, context)
    assert one.load_weights(single.items()) == set(single)
    assert other.load_weights(fused.items()) == set(fused)
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_fp8_keeps_a_derived_copy_that_follows_the_weight(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, "llama-fp8")
    model = load_model(checkpoint)
    layer = model.model.layers["0"].self_attn.o_proj
    stored = dict(read_weights(checkpoint))
    weight = stored["model.layers.0.self_attn.o_proj.weight"].float()
    scale = stored["model.layers.0.self_attn.o_proj.weight_scale_inv"]
    assert torch.equal(layer.dense, weight * scale.repeat_interleave(8, 0).repeat_interleave(8, 1))
    assert "model.layers.0.self_attn.o_proj.dense" not in model.state_dict()
    before = layer.dense.data_ptr()
    layer.weight_scale_inv.data.mul_(2)
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.dense.data_ptr() == before
    assert torch.equal(layer.dense, 2 * weight * scale.repeat_interleave(8, 0).repeat_interleave(8, 1))


def test_builds_on_the_meta_device(tmp_path: Path) -> None:
    model = build_model(opened(tmp_path, "qwen3-moe-fp8"), device="meta")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model.model.layers["0"].mlp.experts.expert_map.tolist() == list(range(8))


def test_features_that_are_only_loaded_are_not_computed_silently(tmp_path: Path) -> None:
    model = load_model(opened(tmp_path, "llama", rope_scaling={"rope_type": "yarn", "factor": 4.0}, hidden_act="gelu"))
    with pytest.raises(NotImplementedError, match="hidden_act 'gelu', rope_type 'yarn'"):
        model(TOKENS)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden_size": None}, InputError, "hidden_size is missing, expected an integer"),
        ({"hidden_size": "64"}, InputError, "hidden_size is '64', expected an integer"),
        ({"num_hidden_layers": -1}, InputError, "num_hidden_layers is '-1', expected an integer from 1"),
        ({"vocab_size": 1 << 40}, InputError, "vocab_size is '1099511627776', expected an integer from 1"),
        ({"rms_norm_eps": "small"}, InputError, "rms_norm_eps is 'small', expected a number"),
        ({"rope_scaling": 3}, InputError, "rope_scaling is '3', expected an object"),
        ({"torch_dtype": "int8"}, InputError, "dtype is 'int8', expected one of float32"),
        ({"mlp_only_layers": 3}, InputError, "mlp_only_layers is '3', expected a list"),
        ({"quantization_config": {"quant_method": "gptq"}}, UsageError, "one quantization, fp8 .* this is 'gptq'"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 8]}},
            InputError,
            "block is '0', expected an integer",
        ),
    ],
)
def test_configurations_that_cannot_be(changes: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ModelConfig.read(json.loads(json.dumps(preset("llama", **changes))))


def test_a_block_that_would_be_cut_is_refused() -> None:
    config = ModelConfig.read(preset("llama-fp8", intermediate_size=72))
    with pytest.raises(UsageError, match=r"intermediate_size: 36 per rank \(tp=2\) does not end on an FP8 block of 8"):
        config.check_topology(Topology(tp=2))
