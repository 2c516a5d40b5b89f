"""Checkpoints A and B of each model, made once; results of cold engines, made once."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm_serving.serving import ENVIRONMENT, serve

# Before vLLM is imported; where it is not installed, other tests share this process and this environment.
if importlib.util.find_spec("vllm") is not None:
    os.environ.update(ENVIRONMENT)

Checkpoints = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Name of a model -> folders of A and B, which differ in every tensor."""
    from tests.engines.vllm_serving.checkpoints import save

    made: dict[str, tuple[Path, Path]] = {}

    def of(name: str) -> tuple[Path, Path]:
        if name not in made:
            root = tmp_path_factory.mktemp(name)
            made[name] = (save(name, root / "A", 1), save(name, root / "B", 2))
        return made[name]

    return of


@pytest.fixture(scope="session")
def cold() -> Callable[[Path], tuple[dict[str, str], Any]]:
    """Folder -> digests and tokens of an engine without the plugin that has never been reloaded."""
    known: dict[Path, tuple[dict[str, str], Any]] = {}

    def of(folder: Path) -> tuple[dict[str, str], Any]:
        if folder not in known:
            with serve(folder) as served:
                known[folder] = (served.digests, served.tokens())
        return known[folder]

    return of
