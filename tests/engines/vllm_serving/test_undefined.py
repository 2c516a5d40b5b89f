"""Weights that are a mixture of two updates, or that sleep has discarded, do not generate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm_serving.serving import Served, serve
from tests.engines.vllm_serving.test_reload import MISSING, without

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def folders(checkpoints: Any) -> tuple[Path, Path]:
    return checkpoints("qwen3-moe")


@pytest.fixture(scope="module")
def served(folders: tuple[Path, Path], cold: Any) -> Iterator[Served]:
    cold(folders[1])
    with serve(folders[0], "record") as engine:
        yield engine


def fail(served: Served, folder: Path) -> None:
    from probe_cli.errors import IncompleteUpdate

    with pytest.raises(IncompleteUpdate):
        served.reload(weights_iterator=without(folder, *MISSING))
    assert served.status["state"] == "undefined"


def repair(served: Served, folder: Path, cold: Any) -> None:
    served.reload(weights_path=str(folder))
    assert (served.digests, served.tokens()) == cold(folder)


def test_requests_are_refused_until_a_full_update(served: Served, folders: tuple[Path, Path], cold: Any) -> None:
    from probe_cli.errors import ReloadError

    fail(served, folders[1])
    for _ in range(2):
        with pytest.raises(ReloadError, match="the weights are undefined, requests are refused") as failure:
            served.tokens()
        assert all(name in str(failure.value) for name in MISSING)
    fail(served, folders[1])
    with pytest.raises(ReloadError, match="requests are refused"):
        served.tokens()
    repair(served, folders[1], cold)


def test_requests_under_way_end_with_an_error(served: Served, folders: tuple[Path, Path], cold: Any) -> None:
    from vllm import SamplingParams

    engine = served.llm.llm_engine
    sampling = SamplingParams(max_tokens=50, detokenize=False)
    engine.add_request("early", {"prompt_token_ids": [5, 6, 7]}, sampling)
    engine.step()
    fail(served, folders[1])
    (output,) = engine.step()
    assert output.finished and output.outputs[0].finish_reason == "error"
    assert not engine.has_unfinished_requests()
    repair(served, folders[1], cold)


@pytest.fixture
def discarding(served: Served, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sleep as a GPU worker does it, through the replaced method. CPU workers ignore it (`v1/worker/cpu_worker.py`), so what level 2
    does to memory is done here."""
    from probe_cli.engines.vllm.serving.patches import _sleep

    def discard(worker: Any, level: int = 1) -> None:
        if level == 2:
            for parameter in worker.get_model().parameters():
                parameter.data.fill_(float("nan"))

    monkeypatch.setattr(type(served.worker), "sleep", _sleep(discard))
    return lambda level: served.llm.sleep(level)


def test_after_sleep_level_2_only_a_full_update_serves_case_23(
    served: Served, folders: tuple[Path, Path], cold: Any, discarding: Callable[[int], None]
) -> None:
    from probe_cli.errors import IncompleteUpdate, ReloadError

    repair(served, folders[1], cold)
    discarding(2)
    served.llm.wake_up()
    assert served.status["state"] == "undefined"
    with pytest.raises(ReloadError, match="sleep level 2 has discarded them"):
        served.tokens()
    with pytest.raises(IncompleteUpdate):
        served.reload(weights_iterator=iter([]))
    assert served.status["state"] == "undefined"  # nothing was published, but there are no old weights to go back to
    repair(served, folders[1], cold)


def test_sleep_level_1_keeps_the_weights(
    served: Served, folders: tuple[Path, Path], cold: Any, discarding: Callable[[int], None]
) -> None:
    repair(served, folders[1], cold)
    discarding(1)
    served.llm.wake_up()
    assert (served.digests, served.tokens()) == cold(folders[1])


# Engines of their own, which end that of the tests above.


def test_all_or_nothing_updates_leave_nothing_to_refuse(folders: tuple[Path, Path], cold: Any) -> None:
    from probe_cli.errors import IncompleteUpdate

    expected = cold(folders[0])
    with serve(folders[0], "record", env={"PROBE_MANIFEST_COMMIT": "model"}) as engine:
        with pytest.raises(IncompleteUpdate):
            engine.reload(weights_iterator=without(folders[1], *MISSING))
        assert (engine.digests, engine.tokens()) == expected


def test_serving_on_can_be_asked_for(folders: tuple[Path, Path]) -> None:
    with serve(folders[0], "record", env={"PROBE_MANIFEST_ON_UNDEFINED": "serve"}) as engine:
        fail(engine, folders[1])
        assert engine.tokens()
