"""Loading code that uses threads, or leaves its work for later: nothing of it may be missing from the contract.

SGLang's DeepSeek loader gives its loader calls to a pool of threads; a dispatch mode sees one thread alone, and the
contract of such a load was empty.
"""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pytest
import torch

from probe_cli.errors import EngineError, ProbeError
from probe_cli.manifest import Manifest
from probe_cli.probe import probe
from tests.oracle import LoadingModel, Weights, applications, check, checkpoint_of, state_of

SOURCES = {"a": torch.arange(4.0), "b": torch.arange(4.0) + 4}


def _model(load: Callable[[Any, Weights], object]) -> LoadingModel:
    return LoadingModel(load, a=torch.full((4,), -1.0), b=torch.full((4,), -1.0))


def _probe(tmp_path: Path, load: Callable[[Any, Weights], object]) -> Manifest:
    return probe(_model(load), checkpoint_of(tmp_path, SOURCES))


def _copy(model: Any, name: str, value: torch.Tensor) -> None:
    getattr(model, name).data.copy_(value)


def _copy_pair(model: Any, pair: tuple[str, torch.Tensor]) -> None:
    _copy(model, *pair)


def _submit(model: Any, weights: Weights) -> None:
    with ThreadPoolExecutor(2) as pool:
        pending = [pool.submit(_copy, model, name, value) for name, value in weights]
        for future in as_completed(pending):
            future.result()


def _map(model: Any, weights: Weights) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda pair: _copy(model, *pair), weights))


def _loaders(model: Any, weights: Weights) -> None:
    for parameter in model.parameters():
        parameter.weight_loader = lambda param, value: param.data.copy_(value)
    with ThreadPoolExecutor(2) as pool:
        for name, value in weights:
            parameter = getattr(model, name)
            pool.submit(parameter.weight_loader, parameter, value).result()


def _async(model: Any, weights: Weights) -> None:
    async def every() -> None:
        await asyncio.gather(*(asyncio.to_thread(_copy, model, name, value) for name, value in weights))

    asyncio.run(every())


def _read_ahead(model: Any, weights: Weights) -> None:
    waiting: queue.Queue[tuple[str, torch.Tensor] | None] = queue.Queue()

    def read() -> None:
        for pair in weights:
            waiting.put(pair)
        waiting.put(None)

    threading.Thread(target=read).start()
    while (pair := waiting.get()) is not None:
        _copy(model, *pair)


@pytest.mark.parametrize("load", [_submit, _map, _loaders, _async, _read_ahead])
def test_what_a_pool_loads_is_in_the_contract(load: Callable[[Any, Weights], object], tmp_path: Path) -> None:
    manifest = _probe(tmp_path, load)
    assert [(a.sources, a.tensor, a.count) for a in applications(manifest)] == [(("a",), "a", 1), (("b",), "b", 1)]

    def loaded(sources: Any) -> LoadingModel:
        model = _model(load)
        model.load_weights(iter(sources.items()))
        return model

    check(manifest, loaded, SOURCES)


def test_an_error_in_a_pool_is_that_of_its_future(tmp_path: Path) -> None:
    def load(model: Any, weights: Weights) -> None:
        def raises() -> None:
            raise KeyError("q")

        with ThreadPoolExecutor(1) as pool:
            future: Future[None] = pool.submit(raises)
        assert isinstance(future.exception(), KeyError)
        with pytest.raises(RuntimeError, match="after shutdown"):
            pool.submit(raises)
        for name, value in weights:
            _copy(model, name, value)

    assert len(applications(_probe(tmp_path, load))) == 2


def _thread(model: Any, weights: Weights) -> None:
    for name, value in weights:
        thread = threading.Thread(target=_copy, args=(model, name, value), name="loader")
        thread.start()
        thread.join()


def _grandchild(model: Any, weights: Weights) -> None:
    outer = threading.Thread(target=_thread, args=(model, weights))
    outer.start()
    outer.join()


def _thread_pool(model: Any, weights: Weights) -> None:
    with ThreadPool(2) as pool:
        pool.map(lambda pair: _copy(model, *pair), list(weights))


def _cast_ahead(model: Any, weights: Weights) -> None:
    cast: dict[str, torch.Tensor] = {}
    thread = threading.Thread(target=lambda: cast.update((name, value.half()) for name, value in weights))
    thread.start()
    thread.join()
    for name, value in cast.items():
        _copy(model, name, value)


def _data(model: Any, weights: Weights) -> None:
    for name, value in weights:
        thread = threading.Thread(target=setattr, args=(getattr(model, name), "data", value))
        thread.start()
        thread.join()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("load", [_thread, _grandchild, _thread_pool, _cast_ahead, _data])
def test_a_load_in_another_thread_ends_the_build_and_writes_nothing(
    load: Callable[[Any, Weights], object], tmp_path: Path
) -> None:
    model = _model(load)
    before = state_of(model)
    with pytest.raises(ProbeError, match="in another thread"):
        probe(model, checkpoint_of(tmp_path, SOURCES))
    after = state_of(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_thread_that_loads_nothing_is_nobody_s_business(tmp_path: Path) -> None:
    def load(model: Any, weights: Weights) -> None:
        sums: list[float] = []
        thread = threading.Thread(target=lambda: sums.append(float(torch.ones(3).add_(1).sum())))
        thread.start()
        thread.join()
        assert sums == [6.0]
        for name, value in weights:
            _copy(model, name, value)

    assert len(applications(_probe(tmp_path, load))) == 2


def test_nothing_is_left_on_threads(tmp_path: Path) -> None:
    before = threading.Thread.start, ThreadPoolExecutor.submit
    _probe(tmp_path, _submit)
    assert (threading.Thread.start, ThreadPoolExecutor.submit) == before


def _generator(model: Any, weights: Weights) -> Any:
    for name, value in weights:
        _copy(model, name, value)
        yield name


async def _coroutine(model: Any, weights: Weights) -> None:
    for name, value in weights:
        _copy(model, name, value)


@pytest.mark.parametrize(
    ("load", "what"),
    [
        (_generator, "generator"),
        (_coroutine, "coroutine"),
        (lambda model, weights: map(functools.partial(_copy_pair, model), weights), "map"),
    ],
)
def test_a_load_that_has_not_run_yet_is_no_load(
    load: Callable[[Any, Weights], object], what: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match=f"load_weights of LoadingModel returned a {what}, so it has not loaded yet"):
        _probe(tmp_path, load)
