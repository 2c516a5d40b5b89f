"""Whatever the bytes: a manifest that can be used, or one line that says what is wrong. No traceback, no runaway."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.manifest.fuzz_manifests import fuzz_bytes, fuzz_document
from tests.manifest.samples import dense_manifests
from tests.manifest.test_document import places

TEXT = dense_manifests()[0].to_bytes()
PLACES = list(places(json.loads(TEXT)))
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5) | st.just("x" * 5000),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=200), st.integers(0, len(TEXT)), st.integers(0, 40))
def test_cut_and_spliced_bytes(extra: bytes, at: int, length: int) -> None:
    fuzz_bytes(TEXT[:at] + extra + TEXT[at + length :])
    fuzz_bytes(extra)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(PLACES), values)
@example(("layers", 0, "applications", 0, "writes", 0, "src"), None)  # the default, spelled out: folding a diff failed
def test_any_value_in_any_place(path: tuple[Any, ...], value: Any) -> None:
    document = json.loads(TEXT)
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    fuzz_document(document)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([path for path in PLACES if isinstance(path[-1], str)]))
def test_any_field_left_out(path: tuple[Any, ...]) -> None:
    document = json.loads(TEXT)
    place = document
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    fuzz_document(document)
