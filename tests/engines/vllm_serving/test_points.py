"""Every place in vLLM that the plugin holds on to is there, with the arguments it counts on. Reads sources, imports nothing: runs with
the CUDA wheel on a host without a GPU too."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from probe_cli.engines.vllm.serving.points import OWN_PLANS, POINTS, check_version
from probe_cli.engines.vllm.versions import installed_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.vllm_cuda]

ARGUMENTS = {
    "create": ["self", "vllm_config", "model_config", "prefix"],
    "process": ["model", "model_config", "target_device"],
    "begin": ["model"],
    "finish": [],
    "worker_finish": ["self"],
    "dummy": ["self", "load_config"],
}


def root() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def source(module: str) -> ast.Module:
    path = root().joinpath(*module.split(".")[1:])
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def find(tree: ast.AST, name: str) -> ast.AST:
    for step in name.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        tree = next(node for node in ast.iter_child_nodes(tree) if isinstance(node, kinds) and node.name == step)
    return tree


def test_the_installed_release_is_supported() -> None:
    installed = installed_vllm()
    assert installed is not None and check_version(installed.version) is None


@pytest.mark.parametrize("name", POINTS)
def test_the_place_is_there(name: str) -> None:
    found = find(source(POINTS[name].module), POINTS[name].name)
    if name in ARGUMENTS:
        assert isinstance(found, ast.FunctionDef)
        assert [argument.arg for argument in found.args.args] == ARGUMENTS[name]


@pytest.mark.parametrize("name", OWN_PLANS)
def test_engines_with_plans_of_their_own_are_there(name: str) -> None:
    assert (root() / "distributed" / "weight_transfer" / f"{name}.py").is_file()


@pytest.mark.parametrize("name", ["ipc_engine", "nccl_engine"])
def test_tracked_engines_begin_and_end_with_vllms_layerwise_reload(name: str) -> None:
    text = (root() / "distributed" / "weight_transfer" / f"{name}.py").read_text()
    assert "initialize_layerwise_reload(self.model)" in text
    assert "finalize_layerwise_reload(self.model, self.model_config)" in text
    assert "self.model.load_weights" in text
