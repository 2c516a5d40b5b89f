"""Loader calls are seen wherever the loader lives, and nothing of the interception stays behind."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import sys
import threading
import types
from collections.abc import Callable
from threading import get_ident
from typing import Any

import pytest
import torch
from torch import nn

from probe_cli.errors import ProbeError
from probe_cli.model.loaders import LoaderInterception, plain_loader

Calls = list[tuple[Any, Any, tuple[Any, ...]]]


def _noop(param: Any, value: Any = None, shard: Any = None) -> str:
    return "loaded"


def _intercept(calls: Calls, *tensors: torch.Tensor, **options: Any) -> LoaderInterception:
    def on_call(loader: Callable[..., object], param: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        calls.append((loader, param, args))
        return loader(*args, **kwargs)

    return LoaderInterception(on_call, tensors, **options)


class WithProperty(nn.Parameter):
    """Like vLLM's BasevLLMParameter (0.32, 0.33): the loader behind a property."""

    @property
    def weight_loader(self) -> Callable[..., object]:
        return self._weight_loader

    @weight_loader.setter
    def weight_loader(self, value: Callable[..., object]) -> None:
        self._weight_loader = value


class Composed(WithProperty):
    @property
    def weight_loader(self) -> Callable[..., object]:
        inner = super().weight_loader
        return functools.partial(inner, shard="composed")

    @weight_loader.setter
    def weight_loader(self, value: Callable[..., object]) -> None:
        WithProperty.weight_loader.__set__(self, value)


class WithMethod(nn.Parameter):
    def weight_loader(self, param: Any, value: Any = None, shard: Any = None) -> str:
        return "method"


class WithSlot(nn.Parameter):
    __slots__ = ("weight_loader",)


class ReadOnly(nn.Parameter):
    @property
    def weight_loader(self) -> Callable[..., object]:
        return _noop


def _parameter(kind: type[nn.Parameter] = nn.Parameter) -> Any:
    parameter: Any = kind(torch.zeros(2))
    if kind not in (WithMethod, ReadOnly):
        parameter.weight_loader = _noop
    return parameter


KINDS = [nn.Parameter, WithProperty, Composed, WithMethod, WithSlot, ReadOnly]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_parameter_is_seen_once_per_call(kind: type[nn.Parameter]) -> None:
    calls: Calls = []
    parameter = _parameter(kind)
    before = dict(vars(parameter))
    with _intercept(calls, parameter):
        result = parameter.weight_loader(parameter, 1)
    assert result == ("method" if kind is WithMethod else "loaded")
    assert [(p is parameter, args) for _, p, args in calls] == [(True, (parameter, 1))] or len(calls) == 2
    assert vars(parameter) == before
    parameter.weight_loader(parameter, 1)
    assert all("weight_loader" not in vars(cls) for cls in (torch.Tensor, nn.Parameter))


def test_classes_get_their_own_attribute_back() -> None:
    parameters = [_parameter(kind) for kind in KINDS]
    before = {kind: vars(kind).get("weight_loader") for kind in KINDS}
    with _intercept([], *parameters):
        pass
    assert {kind: vars(kind).get("weight_loader") for kind in KINDS} == before


def test_loaders_that_are_replaced_during_the_load_are_seen() -> None:
    calls: Calls = []
    parameter = _parameter()
    other = lambda param, value: "other"  # noqa: E731
    with _intercept(calls):
        seen = parameter.weight_loader
        parameter.weight_loader = other
        assert vars(parameter)["weight_loader"] is other
        assert parameter.weight_loader(parameter, 1) == "other"
        parameter.weight_loader = seen  # what was read through the interception is stored plain
        assert vars(parameter)["weight_loader"] is _noop
        assert plain_loader(seen) is _noop
    assert [loader for loader, _, _ in calls] == [other]


def test_a_loader_wrapped_by_the_load_itself_is_seen_once() -> None:
    """vLLM composes loaders: the new one calls the one it found."""
    calls: Calls = []
    parameter = _parameter()
    with _intercept(calls, parameter):
        inner = parameter.weight_loader
        parameter.weight_loader = lambda param, value: inner(param, value)
        assert parameter.weight_loader(parameter, 1) == "loaded"
    assert len(calls) == 2, "the outer and, inside it, the inner one"
    assert calls[1][0] is _noop


def test_late_parameters_and_late_classes_are_seen() -> None:
    calls: Calls = []
    with _intercept(calls) as interception:
        late = _parameter()
        late.weight_loader(late, 1)
        special = WithProperty(torch.zeros(1))
        interception.cover(WithProperty)
        special.weight_loader = _noop
        special.weight_loader(special, 2)
    assert [args[1] for _, _, args in calls] == [1, 2]
    assert isinstance(vars(WithProperty)["weight_loader"], property)


def test_a_parameter_without_a_loader_still_has_none() -> None:
    parameter: Any = nn.Parameter(torch.zeros(1))
    with _intercept([], parameter):
        assert not hasattr(parameter, "weight_loader")
        assert getattr(parameter, "weight_loader", _noop) is _noop
        with pytest.raises(AttributeError, match="weight_loader"):
            parameter.weight_loader  # noqa: B018
        parameter.weight_loader = _noop
        del parameter.weight_loader
        assert not hasattr(parameter, "weight_loader")
        with pytest.raises(AttributeError):
            del parameter.weight_loader
        parameter.weight_loader = None
        assert parameter.weight_loader is None
    assert "weight_loader" in vars(parameter)


def test_an_intercepted_loader_looks_like_the_loader() -> None:
    class Layer:
        def load(self, param: Any, value: Any, shard: Any = None) -> None: ...

    layer = Layer()
    parameter = _parameter()
    parameter.weight_loader = layer.load
    with _intercept([], parameter):
        loader = parameter.weight_loader
        assert callable(loader)
        assert list(inspect.signature(loader).parameters) == ["param", "value", "shard"]
        assert loader.__self__ is layer
        assert loader.__name__ == "load"
        assert loader == layer.load
        assert loader == parameter.weight_loader
        assert hash(loader) == hash(layer.load)
        assert {loader: 1}[parameter.weight_loader] == 1
        assert "Layer.load" in repr(loader)
        assert plain_loader(copy.copy(loader)) == layer.load


def test_a_loader_that_outlives_its_interception_passes_calls_through() -> None:
    calls: Calls = []
    parameter = _parameter()
    with _intercept(calls, parameter):
        kept = parameter.weight_loader
        partial = functools.partial(parameter.weight_loader, parameter)
        partial(1)
    assert kept(parameter, 2) == "loaded"
    assert partial(3) == "loaded"
    assert [args[1] for _, _, args in calls] == [1]


def test_other_threads_are_not_seen() -> None:
    calls: Calls = []
    parameter = _parameter()
    found: list[Any] = []

    def elsewhere() -> None:
        found.append(parameter.weight_loader)
        parameter.weight_loader(parameter, 1)

    with _intercept(calls, parameter):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert calls == []
    assert found == [_noop]


def test_nothing_stays_behind_when_the_load_fails() -> None:
    parameter = _parameter()
    with pytest.raises(KeyboardInterrupt), _intercept([], parameter):
        raise KeyboardInterrupt
    assert parameter.weight_loader is _noop
    assert "weight_loader" not in vars(torch.Tensor)


def test_an_interception_cannot_be_entered_twice_at_once() -> None:
    interception = _intercept([])
    with interception, pytest.raises(ProbeError, match="already active"), interception:
        pass
    with interception:
        assert interception.thread == get_ident()
    assert interception.thread is None


def test_interceptions_may_nest() -> None:
    outer: Calls = []
    inner: Calls = []
    parameter = _parameter()
    with _intercept(outer, parameter):
        with _intercept(inner, parameter):
            parameter.weight_loader(parameter, 1)
        parameter.weight_loader(parameter, 2)
    assert parameter.weight_loader is _noop
    assert [args[1] for _, _, args in inner] == [1]
    assert [args[1] for _, _, args in outer][-1] == 2
    assert "weight_loader" not in vars(torch.Tensor)


def test_default_loaders_are_seen_under_every_name_they_were_imported_to() -> None:
    def default(param: Any, value: Any) -> str:
        return "default"

    one, two = types.ModuleType("probe_tests_one"), types.ModuleType("probe_tests_two")
    one.default_weight_loader = two.renamed = default  # type: ignore[attr-defined]
    sys.modules.update({"probe_tests_one": one, "probe_tests_two": two})
    calls: Calls = []
    try:
        with _intercept(calls, default_loaders=[default]):
            one.default_weight_loader(1, 2)  # type: ignore[attr-defined]
            two.renamed(3, 4)  # type: ignore[attr-defined]
        assert [(loader, param, args) for loader, param, args in calls] == [
            (default, None, (1, 2)),
            (default, None, (3, 4)),
        ]
        assert one.default_weight_loader is default  # type: ignore[attr-defined]
        assert two.renamed is default  # type: ignore[attr-defined]
    finally:
        del sys.modules["probe_tests_one"], sys.modules["probe_tests_two"]


def test_parameters_can_be_copied_and_pickled_meanwhile() -> None:
    parameter = _parameter()
    outside = (hasattr(copy.deepcopy(parameter), "weight_loader"), vars(copy.copy(parameter)))
    with _intercept([], parameter):
        assert torch.equal(pickle.loads(pickle.dumps(parameter)), parameter)
        assert (hasattr(copy.deepcopy(parameter), "weight_loader"), vars(copy.copy(parameter))) == outside
