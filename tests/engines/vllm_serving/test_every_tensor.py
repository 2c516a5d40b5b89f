"""Each tensor of the model left out in turn, in one engine: the update fails, and names that tensor alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm_serving.serving import Served, serve
from tests.engines.vllm_serving.test_reload import tensors

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def folders(checkpoints: Any) -> tuple[Path, Path]:
    return checkpoints("qwen3-moe")


@pytest.fixture(scope="module")
def served(folders: tuple[Path, Path], cold: Any) -> Iterator[Served]:
    cold(folders[1])
    with serve(folders[0], "record", env={"PROBE_MANIFEST_COMMIT": "model"}) as engine:
        yield engine


def test_every_tensor_dropped_in_turn_is_named(served: Served, folders: tuple[Path, Path], cold: Any) -> None:
    from probe_cli.errors import IncompleteUpdate

    sent = tensors(folders[1])
    before = served.digests
    for dropped in sent:
        with pytest.raises(IncompleteUpdate) as failure:
            served.reload(weights_iterator=((name, tensor) for name, tensor in sent.items() if name != dropped))
        receipt = served.status["receipt"]
        assert {row[0].split(" -> ")[0] for row in receipt["missing"]} == {dropped}
        assert dropped in str(failure.value)
        assert served.status["state"] == "ready"  # all or nothing: the old weights serve on
    assert served.digests == before
    served.reload(weights_iterator=iter(sent.items()))
    assert (served.digests, served.tokens()) == cold(folders[1])


def test_every_tensor_twice_and_its_neighbour_dropped_is_named(served: Served, folders: tuple[Path, Path]) -> None:
    from probe_cli.errors import IncompleteUpdate

    sent = list(tensors(folders[1]).items())
    for index, (dropped, _) in enumerate(sent):
        stream = [item for item in sent if item[0] != dropped]
        stream.insert(0, sent[index - 1])
        with pytest.raises(IncompleteUpdate):
            served.reload(weights_iterator=iter(stream))
        assert {row[0].split(" -> ")[0] for row in served.status["receipt"]["missing"]} == {dropped}
