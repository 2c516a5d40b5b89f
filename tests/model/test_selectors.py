"""Rules 2 and 3: the same call gives the same selectors however it is spelled; what is no plain value is an error."""

from __future__ import annotations

import enum
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from probe_cli.errors import ProbeError
from probe_cli.model.selectors import Binder, loader_name
from tests.oracle import random_examples

PARAM = torch.zeros(2)
VALUE = torch.ones(2)


class Shard(enum.Enum):
    Q = "q"
    K = 1


class Level(enum.IntEnum):
    LOW = 1


class Flags(enum.Flag):
    A = 1
    B = 2


def plain(param: torch.Tensor, loaded_weight: torch.Tensor, shard_id: Any = None, expert_id: int = 0) -> None: ...


def keyword_only(
    param: torch.Tensor, loaded_weight: torch.Tensor, *, shard_id: Any = None, expert_id: int = 0
) -> None: ...


def anything(*args: Any, **kwargs: Any) -> None: ...


@functools.wraps(plain)
def decorated(*args: Any, **kwargs: Any) -> Any:
    return plain(*args, **kwargs)


class Owner(nn.Module):
    def load(
        self, param: torch.Tensor, loaded_weight: torch.Tensor, shard_id: Any = None, expert_id: int = 0
    ) -> None: ...

    @classmethod
    def of_class(
        cls, param: torch.Tensor, loaded_weight: torch.Tensor, shard_id: Any = None, expert_id: int = 0
    ) -> None: ...

    @staticmethod
    def static(param: torch.Tensor, loaded_weight: torch.Tensor, shard_id: Any = None, expert_id: int = 0) -> None: ...

    def __call__(
        self, param: torch.Tensor, loaded_weight: torch.Tensor, shard_id: Any = None, expert_id: int = 0
    ) -> None: ...


class Unhashable(list):  # type: ignore[type-arg]
    __hash__ = None  # type: ignore[assignment]

    def __call__(
        self, param: torch.Tensor, loaded_weight: torch.Tensor, shard_id: Any = None, expert_id: int = 0
    ) -> None: ...


OWNER = Owner()

LOADERS: dict[str, Callable[..., Any]] = {
    "function": plain,
    "keyword-only": keyword_only,
    "wraps": decorated,
    "method": OWNER.load,
    "classmethod": Owner.of_class,
    "staticmethod": Owner.static,
    "callable object": OWNER,
    "unhashable callable": Unhashable(),
    "lambda": lambda param, loaded_weight, shard_id=None, expert_id=0: None,
    "partial": functools.partial(plain),
    "partial of a method": functools.partial(OWNER.load),
    "unbound method in a partial": functools.partial(Owner.load, OWNER),
    "nested partial": functools.partial(functools.partial(plain)),
}


def _binder() -> Binder:
    return Binder({OWNER: "owner"})


def _spellings(loader: Callable[..., Any], chosen: dict[str, Any]) -> list[dict[str, Any]]:
    """The same call in every spelling that the signature allows."""
    binder = _binder()
    found = [binder.bind(loader, (PARAM, VALUE), chosen).selectors]
    found.append(binder.bind(loader, (), {"loaded_weight": VALUE, "param": PARAM, **chosen}).selectors)
    positional = "expert_id" not in chosen or "shard_id" in chosen
    if positional and "keyword" not in str(inspect.signature(loader)) and "*" not in str(inspect.signature(loader)):
        found.append(binder.bind(loader, (PARAM, VALUE, *chosen.values()), {}).selectors)
    return found


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("chosen", [{}, {"shard_id": "q"}, {"expert_id": 3}, {"shard_id": "q", "expert_id": 3}])
def test_every_kind_of_loader_gives_the_same_selectors(kind: str, chosen: dict[str, Any]) -> None:
    expected = {"expert_id": 0, **chosen}
    for selectors in _spellings(LOADERS[kind], chosen):
        assert selectors == expected


def test_tensors_come_in_the_order_of_the_signature() -> None:
    bound = _binder().bind(plain, (), {"loaded_weight": VALUE, "param": PARAM})
    assert {name: id(t) for name, t in zip(bound.names, bound.tensors)} == {
        "param": id(PARAM),
        "loaded_weight": id(VALUE),
    }


def test_presets_of_partials_count_outer_ones_first() -> None:
    inner = functools.partial(plain, expert_id=1, shard_id="k")
    outer = functools.partial(inner, expert_id=2)
    assert _binder().bind(outer, (PARAM, VALUE), {}).selectors == {"expert_id": 2, "shard_id": "k"}
    assert _binder().bind(outer, (PARAM, VALUE), {"shard_id": "v"}).selectors == {"expert_id": 2, "shard_id": "v"}


def test_positional_presets_come_first() -> None:
    preset = functools.partial(functools.partial(plain, PARAM), VALUE)
    assert _binder().bind(preset, ("q",), {}).selectors == {"shard_id": "q", "expert_id": 0}


def test_a_method_bound_and_unbound_are_told_apart() -> None:
    binder = _binder()
    for _ in range(2):
        assert binder.bind(OWNER.load, (PARAM, VALUE, "q"), {}).selectors == {"shard_id": "q", "expert_id": 0}
        assert binder.bind(Owner.load, (OWNER, PARAM, VALUE, "q"), {}).selectors == {"shard_id": "q", "expert_id": 0}


def test_an_explicit_default_is_the_default() -> None:
    binder = _binder()
    explicit = binder.bind(plain, (PARAM, VALUE, None, 0), {})
    assert explicit.selectors == binder.bind(plain, (PARAM, VALUE), {}).selectors == {"expert_id": 0}


def test_control_flags_and_modules_are_no_selectors() -> None:
    def loader(self: Any, param: Any, loaded: Any, module: Any, return_success: bool = False) -> None: ...

    binder = _binder()
    for flag in (True, False):
        assert binder.bind(loader, (object(), PARAM, VALUE, OWNER), {"return_success": flag}).selectors == {}
    with pytest.raises(ProbeError, match=r"argument 'module' is of type torch.nn.modules.linear.Linear"):
        binder.bind(loader, (object(), PARAM, VALUE, nn.Linear(1, 1)), {})


def test_loaders_of_args_and_kwargs_give_what_is_no_tensor() -> None:
    binder = _binder()
    bound = binder.bind(anything, (PARAM, VALUE, "q"), {"expert_id": 3})
    assert bound.selectors == {"args": ["q"], "expert_id": 3}
    assert [id(t) for t in bound.tensors] == [id(PARAM), id(VALUE)]
    assert binder.bind(anything, (PARAM, VALUE), {}).selectors == {}
    assert binder.bind(anything, (), {"param": PARAM, "loaded_weight": VALUE, "x": 1}).selectors == {"x": 1}


def test_positional_only_and_extra_positionals() -> None:
    def loader(param: Any, loaded: Any, /, shard: Any, *rest: Any, last: Any = None) -> None: ...

    bound = _binder().bind(loader, (PARAM, VALUE, "q", 1, 2), {"last": (3,)})
    assert bound.selectors == {"shard": "q", "rest": [1, 2], "last": [3]}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("q", "q"),
        (0, 0),
        (True, True),
        (1.5, 1.5),
        (("q", 1), ["q", 1]),
        ((("q", 1), (None, 2.0)), [["q", 1], [None, 2.0]]),
        ([0, 1], [0, 1]),
        (torch.Size([2, 3]), [2, 3]),
        (Shard.Q, {"enum": "Shard.Q"}),
        (Level.LOW, {"enum": "Level.LOW"}),
        (torch.bfloat16, {"dtype": "bfloat16"}),
        ((Shard.K, torch.int8), [{"enum": "Shard.K"}, {"dtype": "int8"}]),
        (np.str_("q"), "q"),
    ],
)
def test_plain_values_become_json(value: Any, expected: Any) -> None:
    found = _binder().bind(plain, (PARAM, VALUE, value), {}).selectors["shard_id"]
    assert found == expected
    assert type(found) is type(expected)


def test_true_and_one_are_two_selectors() -> None:
    one, true = (_binder().bind(plain, (PARAM, VALUE, value), {}).selectors["shard_id"] for value in (1, True))
    assert type(one) is int
    assert type(true) is bool


@pytest.mark.parametrize(
    ("value", "described"),
    [
        ({"q": 1}, "builtins.dict"),
        ({1, 2}, "builtins.set"),
        (b"q", "builtins.bytes"),
        (object(), "builtins.object"),
        (np.int64(3), "numpy.int64"),
        (np.float64(3), "float64"),
        (math.nan, "nan (float)"),
        (math.inf, "inf (float)"),
        ((1, {"q": 1}), "builtins.dict"),
        (slice(0, 1), "builtins.slice"),
        (torch.device("cpu"), "torch.device"),
        (Flags(0), "Flags"),
        (1j, "builtins.complex"),
        (len, "builtins.builtin_function_or_method"),
    ],
)
def test_anything_else_names_loader_argument_and_type(value: Any, described: str) -> None:
    with pytest.raises(ProbeError) as failure:
        _binder().bind(plain, (PARAM, VALUE, value), {})
    text = str(failure.value)
    assert "weight loader plain: argument 'shard_id' is " in text
    assert described in text
    assert "\n" not in text
    assert failure.value.hint is not None


def test_a_loader_without_a_readable_signature_is_an_error() -> None:
    class Strange:
        __signature__ = "none"

        def __call__(self, *args: Any) -> None: ...

    with pytest.raises(ProbeError, match=r"weight loader .*Strange has no readable signature"):
        _binder().bind(Strange(), (PARAM, VALUE), {})


def test_lists_of_tensors_are_tensors() -> None:
    bound = _binder().bind(plain, (PARAM, [VALUE, VALUE]), {})
    assert (bound.names, len(bound.tensors)) == (("param", "loaded_weight", "loaded_weight"), 3)
    assert bound.selectors == {"expert_id": 0}


def test_accepts_says_whether_a_loader_can_decline() -> None:
    def declines(param: Any, loaded: Any, return_success: bool = False) -> bool:
        return True

    binder = _binder()
    assert binder.accepts(declines, "return_success")
    assert binder.accepts(functools.partial(declines), "return_success")
    assert binder.accepts(anything, "return_success")
    assert not binder.accepts(plain, "return_success")


def test_names_of_loaders() -> None:
    assert loader_name(functools.partial(functools.partial(plain))) == "plain"
    assert loader_name(OWNER.load) == "Owner.load"
    assert loader_name(OWNER) == "Owner"


@random_examples
@given(
    st.sampled_from(sorted(LOADERS)),
    st.one_of(
        st.none(), st.text(max_size=3), st.integers(), st.booleans(), st.tuples(st.integers(), st.text(max_size=2))
    ),
    st.integers(0, 9),
)
def test_positional_or_keyword_makes_no_difference(kind: str, shard: Any, expert: int) -> None:
    spellings = _spellings(LOADERS[kind], {"shard_id": shard, "expert_id": expert})
    assert all(found == spellings[0] for found in spellings)
    assert ("shard_id" in spellings[0]) == (shard is not None)
