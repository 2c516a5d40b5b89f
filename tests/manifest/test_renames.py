"""A checkpoint saved by another class has every name changed in the same way: one rule says it, not ninety thousand
lines."""

from __future__ import annotations

import pytest

from probe_cli.manifest.renames import Rule, find_renames

NAMES = [
    f"model.layers.{i}.mlp.experts.{e}.{p}_proj.{w}"
    for i in range(4)
    for e in range(8)
    for p in ("gate", "up", "down")
    for w in ("weight", "weight_scale_inv")
] + ["model.embed_tokens.weight", "model.norm.weight"]


def signature(name: str) -> str:
    return name.rpartition(".")[2] + ("down" if "down" in name else "")


@pytest.mark.parametrize(
    ("change", "rule", "text"),
    [
        (lambda n: n.removeprefix("model."), Rule("model", "", "start"), "the prefix model. is missing"),
        (lambda n: "vision." + n, Rule("", "vision", "start"), "the prefix vision. is added"),
        (lambda n: n.replace("model.", "model.language_model.", 1), None, "model became model.language_model"),
        (
            lambda n: n.replace(".mlp.", ".feed_forward."),
            Rule("mlp", "feed_forward", "middle"),
            "mlp became feed_forward",
        ),
        (lambda n: n.replace(".experts.", ".experts.routed."), None, "experts became experts.routed"),
        (lambda n: n + ".data", Rule("", "data", "end"), "the suffix .data is added"),
    ],
)
def test_one_rule_explains_every_changed_name(change: object, rule: Rule | None, text: str) -> None:
    old = {name: signature(name) for name in NAMES}
    new = {change(name): signature(name) for name in NAMES}  # type: ignore[operator]
    gone = {n: s for n, s in old.items() if n not in new}
    came = {n: s for n, s in new.items() if n not in old}
    (rename,) = find_renames(gone, came)
    assert str(rename.rule) == text
    assert rule is None or rename.rule == rule
    assert dict(rename.pairs) == {name: change(name) for name in gone}  # type: ignore[operator]


def test_two_rules_are_told_apart() -> None:
    old = {name: signature(name) for name in NAMES if name.endswith("weight_scale_inv") or "norm" in name}
    new = {
        name.replace("weight_scale_inv", "weight_scale").replace("model.norm", "model.final_norm"): s
        for name, s in old.items()
    }
    renames = find_renames(old, new)
    assert [(str(r.rule), len(r.pairs)) for r in renames] == [
        ("weight_scale_inv became weight_scale", 96),
        ("norm became final_norm", 1),
    ]


def test_names_of_another_signature_are_no_renames() -> None:
    assert find_renames({"model.norm.weight": (8,)}, {"norm.weight": (9,)}) == []


def test_unlike_names_are_no_renames() -> None:
    assert find_renames({"model.layers.3.mlp.w1": 0}, {"vision.blocks.3.attn.bias": 0}) == []
