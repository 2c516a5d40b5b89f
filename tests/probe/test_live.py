"""A live model is bit for bit, and object for object, what it was: after a probe, a failing loader, an interrupt."""

from __future__ import annotations

import contextlib
import enum
import functools
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from probe_cli.errors import EngineError
from probe_cli.probe import probe
from tests.oracle import checkpoint_of, snapshot_of, state_of

SOURCES = {"a": torch.arange(4.0), "b": torch.arange(4.0) + 4}


class Stage(enum.Enum):
    COLD = 1
    WARM = 2


class Helper:
    def __init__(self) -> None:
        self.calls = 0
        self.names: list[str] = []

    def load(self, param: torch.Tensor, value: torch.Tensor) -> None:
        self.calls += 1
        self.names.append("x")
        param.data.copy_(value)


class Slotted:
    __slots__ = ("count", "items")

    def __init__(self) -> None:
        self.count = 0
        self.items = [1]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("table", torch.arange(4))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)
        self.stage = Stage.COLD
        self.nested: dict[str, Any] = {"list": [1, [2, 3]], "set": {1, 2}, "dict": {"k": [4]}, "tuple": ([5],)}
        self.ordered = OrderedDict(z=1, a=2)
        self.default: defaultdict[str, list[int]] = defaultdict(list)
        self.queue = deque([1, 2], maxlen=5)
        self.array = np.zeros(3)
        self.blob = bytearray(b"abc")
        self.helper = Helper()
        self.slotted = Slotted()
        self.plain = torch.ones(2)
        self.hook_handle = self.register_forward_hook(lambda *args: None)
        self.weight.weight_loader = self.helper.load
        self.weight.extra = {"shard": [0]}
        calls = 0

        def counting(param: torch.Tensor, value: torch.Tensor) -> None:
            nonlocal calls
            calls += 1
            param.data.copy_(value)

        self.counting = counting
        self.partial = functools.partial(counting, self.weight)
        self.read_calls = lambda: calls


class Outer(nn.Module):
    def __init__(self, damage: Callable[[Any, str, torch.Tensor], None]) -> None:
        super().__init__()
        self.inner = Inner()
        self.tied = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.tied.weight
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.tied.bias.grad = torch.ones(4)
        self._damage = damage

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, value in weights:
            self._damage(self, name, value)


def _deep(model: nn.Module) -> list[Any]:
    """The contents of every container, besides identities."""
    inner: Any = model.inner
    found: list[Any] = [
        repr(inner.nested), list(inner.ordered.items()), dict(inner.default), list(inner.queue), inner.array.tolist(),
        bytes(inner.blob), inner.helper.calls, list(inner.helper.names), inner.slotted.count, list(inner.slotted.items),
        inner.stage, inner.read_calls(), repr(inner.weight.extra), inner.plain.tolist(), inner.training,
        list(inner._forward_hooks), list(model._modules), list(inner._parameters), list(inner._buffers),
        set(inner._non_persistent_buffers_set), vars(inner.weight)["weight_loader"] == inner.helper.load,
    ]  # fmt: skip
    found += [id(p.grad) for p in model.parameters()]
    found += [
        id(x) for x in (inner.nested["list"], inner.nested["dict"]["k"], inner.weight.extra["shard"], inner.queue)
    ]
    found += [[] if p.grad is None else p.grad.tolist() for p in model.parameters()]
    return found


def _everything(model: Outer, name: str, value: torch.Tensor) -> None:
    inner: Any = model.inner
    inner.weight.weight_loader(inner.weight, value)
    inner.counting(inner.weight, value)
    inner.weight = nn.Parameter(value * 1)
    inner.weight.weight_loader = lambda param, value: None
    inner.weight.extra2 = 1
    inner.table = torch.zeros(2)
    inner.scratch.data = value
    inner.register_buffer("late", value + 0)
    inner.register_parameter("later", nn.Parameter(value + 0))
    inner.stage = Stage.WARM
    inner.nested["list"][1].append(9)
    inner.nested["set"].add(9)
    inner.nested["dict"]["k"].clear()
    inner.nested["tuple"][0].append(1)
    inner.nested["new"] = value
    inner.ordered.move_to_end("z")
    inner.default["x"].append(1)
    inner.queue.append(7)
    inner.array[0] = 5
    inner.blob[0] = 0
    inner.slotted.count += 1
    inner.slotted.items.append(2)
    inner.plain = value
    inner.extra_module = nn.Linear(1, 1)
    inner.hook_handle.remove()
    inner.eval()
    inner.brand_new = [value]
    model.frozen.requires_grad_(True)
    model.tied.weight.requires_grad_(False)
    model.tied.bias.grad = None
    model.head.weight = nn.Parameter(torch.zeros(4, 4))
    model.added = nn.ReLU()
    model.frozen.weight_loader = lambda *args: None
    model.frozen.t_()


def _deleting(model: Outer, name: str, value: torch.Tensor) -> None:
    inner: Any = model.inner
    if name == "a":
        inner.table.copy_(value)
        del inner.weight.weight_loader
        del inner.scratch
        del inner.nested
        del model.frozen
        delattr(model, "head")


DAMAGE = {"everything": _everything, "deleting": _deleting}


def _raising(kind: str) -> Callable[[Any, str, torch.Tensor], None]:
    errors: dict[str, type[BaseException]] = {
        "error": ValueError, "interrupt": KeyboardInterrupt, "exit": SystemExit, "generator": GeneratorExit,
    }  # fmt: skip

    def damage(model: Outer, name: str, value: torch.Tensor) -> None:
        _everything(model, name, value)
        raise errors[kind]("in the middle")

    return damage


def _swallowing(model: Outer, name: str, value: torch.Tensor) -> None:
    with contextlib.suppress(ValueError):
        _raising("error")(model, name, value)


@pytest.mark.parametrize("kind", [*DAMAGE, "error", "interrupt", "exit", "generator", "swallowed"])
@pytest.mark.parametrize("verify", [False, True])
def test_the_model_is_what_it_was(kind: str, verify: bool, tmp_path: Path) -> None:
    damage = DAMAGE.get(kind) or (_swallowing if kind == "swallowed" else _raising(kind))
    model = Outer(damage)
    before, seen, deep = state_of(model), snapshot_of(model), _deep(model)
    expected = {"interrupt": KeyboardInterrupt, "exit": SystemExit, "generator": GeneratorExit}.get(kind, EngineError)
    # Loading code that changes itself does something else the second time.
    fine = kind == "deleting" or (not verify and kind in ("everything", "swallowed"))
    with contextlib.nullcontext() if fine else pytest.raises(expected):
        probe(model, checkpoint_of(tmp_path, SOURCES), verify=verify)
    assert snapshot_of(model) == seen
    assert _deep(model) == deep
    after = state_of(model)
    assert list(after) == list(before)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert model.head.weight is model.tied.weight
    for name in ("weight_loader", "data", "tolist", "numpy", "__dlpack__", "__format__"):
        assert name not in vars(torch.Tensor) or name in ("__dlpack__", "__format__")
    assert "weight_loader" not in vars(nn.Parameter)


def test_the_model_still_trains_after_a_probe(tmp_path: Path) -> None:
    """Autograd sees the same leaves, at the same versions."""
    model = Outer(lambda m, n, w: m.tied.bias.data.copy_(w))
    model.tied.bias.grad = None
    saved = model.tied(torch.ones(1, 4)).sum()
    probe(model, checkpoint_of(tmp_path, SOURCES))
    saved.backward()
    assert model.tied.bias.grad is not None
    assert model.tied.bias.grad.tolist() == [1.0] * 4


def test_grad_mode_and_inference_mode_are_left_alone(tmp_path: Path) -> None:
    def damage(model: Outer, name: str, value: torch.Tensor) -> None:
        torch.set_grad_enabled(True)
        with torch.inference_mode():
            model.frozen.copy_(value)

    for before in (True, False):
        with torch.set_grad_enabled(before):
            probe(Outer(damage), checkpoint_of(tmp_path, SOURCES))
            assert torch.is_grad_enabled() is before
            assert not torch.is_inference_mode_enabled()


def test_a_model_built_in_inference_mode_can_be_probed(tmp_path: Path) -> None:
    with torch.inference_mode():
        model = Outer(lambda m, n, w: m.frozen.copy_(w))
        before = state_of(model)
        manifest = probe(model, checkpoint_of(tmp_path, SOURCES))
        assert all(torch.equal(before[name], value) for name, value in state_of(model).items())
    assert manifest.document.summary.direct_writes == 2


def test_other_threads_go_on_unaffected(tmp_path: Path) -> None:
    """Another thread writes, assigns data, reads loaders and memory while a probe is running."""
    inside, done = threading.Event(), threading.Event()
    results: list[Any] = []
    other = nn.Parameter(torch.zeros(2), requires_grad=False)
    other.weight_loader = results.append

    def elsewhere() -> None:
        inside.wait(10)
        try:
            other.copy_(torch.ones(2))
            other.data = torch.full((3,), 2.0)
            results.append(other.tolist())
            other.numpy()[0] = 5
            other.untyped_storage()[11] = 0
            other.weight_loader("called")
            results.append(type(other.weight_loader).__name__)
            results.append(hasattr(torch.zeros(1), "weight_loader"))
        except BaseException as error:
            results.append(error)
        done.set()

    def damage(model: Outer, name: str, value: torch.Tensor) -> None:
        model.frozen.copy_(value)
        inside.set()
        assert done.wait(10)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    probe(Outer(damage), checkpoint_of(tmp_path, SOURCES))
    thread.join()
    assert results == [[2.0, 2.0, 2.0], "called", "builtin_function_or_method", False]
    assert other[0] == 5


def test_two_probes_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    manifests: list[Any] = []

    def damage(model: Outer, name: str, value: torch.Tensor) -> None:
        model.inner.weight.weight_loader(model.inner.weight, value)

    def work(folder: Path) -> None:
        manifests.append(probe(Outer(damage), checkpoint_of(folder, SOURCES)))

    threads = [threading.Thread(target=work, args=(tmp_path / str(i),)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({manifest.digest for manifest in manifests}) == 1
    assert "weight_loader" not in vars(torch.Tensor)
    assert "data" not in vars(torch.Tensor)


def test_a_probe_within_a_probe(tmp_path: Path) -> None:
    """A model whose loading code probes another one."""
    inner = Outer(lambda m, n, w: m.frozen.copy_(w))
    checkpoint = checkpoint_of(tmp_path, SOURCES)

    def damage(model: Outer, name: str, value: torch.Tensor) -> None:
        if name == "a":
            DIGESTS.append(probe(inner, checkpoint).digest)
        model.inner.weight.data = value

    DIGESTS.clear()
    outer = probe(Outer(damage), checkpoint)
    assert [probe(inner, checkpoint).digest] == DIGESTS
    assert outer.document.summary.direct_writes == 2
    assert "data" not in vars(torch.Tensor)


DIGESTS: list[str] = []


def test_load_weights_that_fails_names_the_source(tmp_path: Path) -> None:
    def damage(model: Outer, name: str, value: torch.Tensor) -> None:
        if name == "b":
            raise KeyError("no such expert")

    with pytest.raises(EngineError, match=r"load_weights of Outer failed at source b: KeyError: 'no such expert'"):
        probe(Outer(damage), checkpoint_of(tmp_path, SOURCES))


def test_a_loader_whose_error_is_swallowed_ends_the_build(tmp_path: Path) -> None:
    """What an engine only logs is a tensor that did not arrive."""

    def loader(param: torch.Tensor, value: torch.Tensor) -> None:
        raise ValueError("no such shard")

    def damage(model: Outer, name: str, value: torch.Tensor) -> None:
        model.frozen.weight_loader = loader
        with contextlib.suppress(ValueError):
            model.frozen.weight_loader(model.frozen, value)

    with pytest.raises(
        EngineError, match=r"weight loader .*loader raised while loading source a: ValueError: no such shard"
    ):
        probe(Outer(damage), checkpoint_of(tmp_path, SOURCES))


def test_trying_a_call_that_does_not_fit_is_no_error(tmp_path: Path) -> None:
    def loader(param: torch.Tensor, value: torch.Tensor) -> None:
        param.data.copy_(value)

    def damage(model: Outer, name: str, value: torch.Tensor) -> None:
        model.frozen.weight_loader = loader
        try:
            model.frozen.weight_loader(model.frozen, value, shard_id="q")
        except TypeError:
            model.frozen.weight_loader(model.frozen, value)

    manifest = probe(Outer(damage), checkpoint_of(tmp_path, SOURCES))
    assert (manifest.document.summary.applications, manifest.document.summary.direct_writes) == (2, 0)
