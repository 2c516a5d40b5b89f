"""One lost MoE layer is thousands of names: folded, they must still be those names and no others."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from probe_cli.manifest.patterns import Pattern, fold, fold_text, format_numbers, merge_words

names = st.lists(
    st.from_regex(r"\A(model\.)?layers\.[0-3]\.(experts\.[0-3]\.)?(w[12]|0[01]|k)\Z") | st.text(max_size=12),
    max_size=40,
)


@settings(max_examples=50)
@given(names)
def test_the_patterns_stand_for_exactly_the_names(given_names: list[str]) -> None:
    expanded = [name for pattern in fold(given_names) for name in pattern.names()]
    assert sorted(expanded) == sorted(set(given_names))


def test_layers_and_experts_fold_into_one_pattern() -> None:
    every = [f"model.layers.{i}.mlp.experts.{e}.down_proj.weight" for i in range(3, 61) for e in range(256)]
    (pattern,) = fold(every)
    assert str(pattern) == "model.layers.{3-60}.mlp.experts.{0-255}.down_proj.weight"
    assert pattern.count == 14848


def test_a_hole_splits_a_pattern_instead_of_being_covered() -> None:
    every = [f"layers.{i}.experts.{e}" for i in range(4) for e in range(4) if (i, e) != (2, 1)]
    assert [str(pattern) for pattern in fold(every)] == ["layers.{0,1,3}.experts.{0-3}", "layers.2.experts.{0,2,3}"]


def test_numbers_with_leading_zeros_are_text() -> None:
    assert [str(p) for p in fold(["rank-00000", "rank-00001"])] == ["rank-00000", "rank-00001"]


def test_number_sets_read_as_ranges() -> None:
    assert format_numbers([0, 1, 2, 5, 7, 8]) == "0-2,5,7,8"
    assert format_numbers([0, 4, 8, 12]) == "0-12 step 4"
    assert format_numbers([3]) == "3"


def test_lines_count_what_they_fold_and_what_they_leave_out() -> None:
    given = ["a.0", "a.1", "b.x.c", "d.y.e"]
    assert fold_text(given, limit=2) == ["a.{0,1} (2)", "b.x.c", "... and 1 more names"]
    assert Pattern(("norm.weight",)).count == 1


def test_words_merge_where_every_combination_is_there() -> None:
    parts = [f"l.{i}.{p}_proj.{w}" for i in range(3) for p in ("gate", "up") for w in ("weight", "weight_scale")]
    assert fold_text(parts) == ["l.{0-2}.{gate_proj,up_proj}.{weight,weight_scale} (12)"]
    assert fold_text(parts[1:]) == [
        "l.{0-2}.gate_proj.weight_scale (3)",
        "l.{0-2}.up_proj.{weight,weight_scale} (6)",
        "l.{1,2}.gate_proj.weight (2)",
    ]


@settings(max_examples=50)
@given(names)
def test_merged_lines_are_made_of_all_patterns_once(given_names: list[str]) -> None:
    patterns = fold(given_names)
    merged = [pattern for _, members in merge_words(patterns) for pattern in members]
    assert sorted(map(str, merged)) == sorted(map(str, patterns))
