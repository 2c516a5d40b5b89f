"""Load in one thread, abort in another; one update at a time for one model; a crashed thread does not lock the model
up."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from probe_cli.errors import ReloadError
from probe_cli.reload import ReloadSession
from tests.reload.cases import DEEP, Deep
from tests.reload.models import cold, same, session_of, state, weights_like


def test_abort_from_another_thread_while_loading() -> None:
    a, b = weights_like(DEEP, 1), weights_like(DEEP, 2)
    session = session_of(Deep, a, commit="model")
    before = state(session.model)
    half_way, go_on = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for index, (name, tensor) in enumerate(b.items()):
            if index == 90:
                half_way.set()
                go_on.wait(10)
            yield name, tensor

    update = session.update()

    def load() -> None:
        try:
            update.load_weights(stream())
        except ReloadError as error:
            errors.append(error)

    loader = threading.Thread(target=load)
    loader.start()
    assert half_way.wait(10)
    aborter = threading.Thread(target=update.abort, args=("the trainer has died",))
    aborter.start()
    while not update._aborted.is_set():
        pass
    go_on.set()
    loader.join(10)
    aborter.join(10)
    assert len(errors) == 1 and "the trainer has died" in str(errors[0])
    assert not update.open and session.state == "ready" and same(state(session.model), before)
    with session.update() as again:
        again.load_weights(b.items())
    assert same(state(session.model), state(cold(Deep, b)[0]))


def test_abort_from_another_thread_between_chunks() -> None:
    b = weights_like(DEEP, 2)
    session = session_of(Deep, weights_like(DEEP, 1))
    update = session.update()
    update.load_weights([("layer.0.q", b["layer.0.q"])])
    thread = threading.Thread(target=update.abort)
    thread.start()
    thread.join(10)
    assert not update.open and session.state == "ready"
    with pytest.raises(ReloadError, match="aborted"):
        update.load_weights(b.items())
    with pytest.raises(ReloadError, match="aborted"):
        update.finish()


def test_a_second_session_and_a_second_update_are_refused_while_one_is_under_way() -> None:
    a, b = weights_like(DEEP, 1), weights_like(DEEP, 2)
    model, manifest, captured = cold(Deep, a)
    first = ReloadSession(model, manifest, cold=captured)
    second = ReloadSession(model, manifest, cold=captured)
    with first.update() as update:
        assert first.state == "updating"
        with pytest.raises(ReloadError, match="is updating this model"):
            second.update()
        with pytest.raises(ReloadError, match="is updating this model"):
            first.update()
        with pytest.raises(ReloadError, match="is updating this model"):
            ReloadSession(model, manifest)
        update.load_weights(b.items())
    with second.update() as update:
        update.load_weights(b.items())
    assert same(state(model), state(cold(Deep, b)[0]))


def test_a_new_session_takes_over_from_a_thread_that_has_died() -> None:
    a, b = weights_like(DEEP, 1), weights_like(DEEP, 2)
    model, manifest, captured = cold(Deep, a)
    before = state(model)

    def crash() -> None:
        update = ReloadSession(model, manifest, cold=captured).update()
        update.load_weights([("layer.3.q", b["layer.3.q"])])  # and never comes back

    thread = threading.Thread(target=crash)
    thread.start()
    thread.join(10)
    session = ReloadSession(model, manifest, cold=captured)
    assert session.state == "ready" and same(state(model), before)
    with session.update() as update:
        update.load_weights(b.items())
    assert same(state(model), state(cold(Deep, b)[0]))


def test_the_undefined_state_outlives_its_session() -> None:
    a, b = weights_like(DEEP, 1), weights_like(DEEP, 2)
    model, manifest, captured = cold(Deep, a)
    first = ReloadSession(model, manifest, cold=captured)
    update = first.update()
    update.load_weights((name, b[name]) for name in ("layer.0.q", "layer.0.k", "layer.0.v"))
    update.abort("gone")
    first.close()
    assert first.state == "closed"
    second = ReloadSession(model, manifest, cold=captured)
    assert second.state == "undefined"
    with second.update() as update:
        update.load_weights(b.items())
    assert second.state == "ready" and same(state(model), state(cold(Deep, b)[0]))
