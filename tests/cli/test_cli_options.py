"""Topologies and ranks in every spelling that engines use."""

from __future__ import annotations

import pytest

from probe_cli.cli.inputs import parse_arguments
from probe_cli.cli.options import parse_ranks, topology_of
from probe_cli.errors import UsageError
from probe_cli.topology import Topology


@pytest.mark.parametrize(
    ("flags", "topology"),
    [
        ([], {"tp": 1, "pp": 1, "ep": 1, "dp": 1}),
        (["--tp", "2", "--ep"], {"tp": 2, "pp": 1, "ep": 2, "dp": 1}),
        (["--ep", "--tp", "2"], {"tp": 2, "pp": 1, "ep": 2, "dp": 1}),
        (["-tp", "2", "-ep", "2"], {"tp": 2, "pp": 1, "ep": 2, "dp": 1}),
        (["--tensor-parallel-size=2", "--enable-expert-parallel"], {"tp": 2, "pp": 1, "ep": 2, "dp": 1}),
        (["--tp-size", "2", "--ep-size", "--dp-size=1", "--pp-size", "1"], {"tp": 2, "pp": 1, "ep": 2, "dp": 1}),
        (["--pipeline-parallel-size", "2"], {"tp": 1, "pp": 2, "ep": 1, "dp": 1}),
        (["-pp", "2", "-dp", "2", "--ep", "all"], {"tp": 1, "pp": 2, "ep": 2, "dp": 2}),
        (["--tp", "2", "--data-parallel-size", "2", "--ep=2"], {"tp": 2, "pp": 1, "ep": 2, "dp": 2}),
    ],
)
def test_spellings(run, checkpoint, flags: list[str], topology: dict[str, int]) -> None:
    found = run("build", *flags, checkpoint, "--ranks", "0", "--format", "json")
    assert found.code == 0, found.stderr
    assert found.json["topology"] == topology


@pytest.mark.parametrize("command", ["build", "check"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ep", "0"], "0 is not in the range x>=1"),
        (["--ep=-1"], "-1 is not in the range x>=1"),
        (["--ep", "1", "--enable-expert-parallel"], "--enable-expert-parallel and --ep 1 contradict each other"),
    ],
)
def test_expert_parallel_sizes_that_cannot_be(run, bundle, command: str, flags: list[str], message: str) -> None:
    found = run(command, bundle, "--tp", "2", *flags)
    assert (found.code, found.stdout) == (2, "")
    assert message in found.stderr.splitlines()[0]


def test_ep_before_the_checkpoint_does_not_swallow_it(run, checkpoint) -> None:
    found = run("build", "--tp", "2", "--ep", checkpoint, "--format", "json")
    assert found.code == 0, found.stderr
    assert found.json["topology"]["ep"] == 2


def test_topology_from_parts() -> None:
    assert topology_of(8, None, "all", None) == Topology(tp=8, ep=8)
    assert topology_of(4, 2, None, 2, enable_ep=True) == Topology(tp=4, pp=2, ep=8, dp=2)
    assert topology_of(None, None, None, None) == Topology()
    with pytest.raises(UsageError, match="contradict"):
        topology_of(2, None, 1, None, enable_ep=True)
    with pytest.raises(UsageError, match="ep=3 does not divide tp x dp = 8"):
        topology_of(8, None, 3, None)
    with pytest.raises(UsageError, match="tp=99999 pp=9 ep=1 dp=1: more than 100,000 ranks"):
        topology_of(99999, 9, None, None)


def test_ranks() -> None:
    assert parse_ranks("0-7,12", 16) == (0, 1, 2, 3, 4, 5, 6, 7, 12)
    assert parse_ranks("3, 1,1-2", 4) == (1, 2, 3)
    for text, message in [
        ("7-3", "runs backwards"),
        ("x", "neither a rank nor a range"),
        ("", "neither a rank nor a range"),
        ("-1", "neither a rank nor a range"),
        ("²", "neither a rank nor a range"),  # a digit, and no number
        ("0-²", "neither a rank nor a range"),
        ("0-16", "there is no rank 16 among 16 ranks"),
    ]:
        with pytest.raises(UsageError, match=message):
            parse_ranks(text, 16)


def test_arguments() -> None:
    pairs = ("quantization=fp8", "max-model-len=4096", "--enforce-eager=true", 'hf-overrides={"a": [1]}', "empty=")
    assert parse_arguments(pairs, {"dtype": "bfloat16", "quantization": "awq"}) == {
        "dtype": "bfloat16",
        "quantization": "fp8",
        "max_model_len": 4096,
        "enforce_eager": True,
        "hf_overrides": {"a": [1]},
        "empty": "",
    }
    with pytest.raises(UsageError, match="expected KEY=VALUE"):
        parse_arguments(("fp8",))
