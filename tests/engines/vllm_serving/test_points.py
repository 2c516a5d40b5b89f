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

LOADER = "vllm.model_executor.model_loader"

ARGUMENTS = {
    "create": ["self", "vllm_config", "model_config", "prefix"],
    "process": ["model", "model_config", "target_device"],
    "begin": ["model"],
    "finish": [],
    "worker_finish": ["self"],
    "dummy": ["self", "load_config"],
    "sleep": ["self", "level"],
    "call": ["self", "method", "timeout", "args", "kwargs"],
    "wake": ["self", "tags"],
    "request": ["self", "request", "request_wave"],
    "executor": [
        "self", "method", "timeout", "args", "kwargs", "non_block", "unique_reply_rank", "kv_output_aggregator",
        "ec_output_aggregator",
    ],
}  # fmt: skip

#: What the plugin uses beside the points: module -> names that its source has to hold.
USED = {
    "vllm.v1.executor.multiproc_executor": ["MultiprocExecutor.collective_rpc"],
    "vllm.v1.engine.core": ["EngineCore.__init__", "EngineCoreProc._send_error_outputs_to_client"],
    "vllm.v1.engine": ["EngineCoreOutput", "EngineCoreOutputs", "FinishReason"],
    "vllm.v1.core.sched.scheduler": ["Scheduler.finish_requests"],
    "vllm.v1.worker.gpu_worker": ["Worker.get_model", "Worker.get_draft_model"],
    "vllm.model_executor.model_loader.utils": ["process_weights_after_loading", "device_loading_context"],
    "vllm.distributed.parallel_state": ["get_world_group", "get_tp_group", "get_pp_group"],
    "vllm.config.parallel": ["ParallelConfig.reconfigure_for_independent_dp_rank"],
    "vllm.utils.torch_utils": ["set_default_torch_dtype"],
}

#: Who calls what is replaced: (module, function, what its source has to hold). A point that nobody calls guards nothing.
CALLERS = [
    (f"{LOADER}.base_loader", "BaseModelLoader.load_model", "self.create_model("),
    (
        f"{LOADER}.base_loader",
        "BaseModelLoader.load_model",
        "process_weights_after_loading(model, model_config, target_device)",
    ),
    (f"{LOADER}.utils", "process_weights_after_loading", "quant_method.process_weights_after_loading(module)"),
    (f"{LOADER}.utils", "process_weights_after_loading", "is_deferred_attention_layer(module)"),
    (f"{LOADER}.utils", "process_weights_after_loading", "model.process_weights_after_loading()"),
    (f"{LOADER}.utils", "process_weights_after_loading", "module.update_param_tp_status()"),
    (f"{LOADER}.reload.inplace", "reload_weights", "initialize_layerwise_reload(model)"),
    (f"{LOADER}.reload.inplace", "reload_weights", "finalize_layerwise_reload(model"),
    (f"{LOADER}.reload.inplace", "reload_weights", "model.load_weights("),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.reload_weights", "reload_weights("),
    (
        "vllm.v1.worker.gpu_worker",
        "Worker.finish_weight_update",
        "self.weight_transfer_engine.reset_weight_update_target()",
    ),
    ("vllm.v1.worker.gpu_worker", "Worker.finish_weight_update", "self._weight_update_active = False"),
    ("vllm.v1.worker.gpu_worker", "Worker.load_model", "self.model_runner.load_model("),
    (
        "vllm.v1.spec_decode.llm_base_proposer",
        "SpecDecodeBaseProposer._maybe_share_embeddings",
        ".embed_tokens = target_embed_tokens",
    ),
    ("vllm.v1.executor.multiproc_executor", "MultiprocExecutor.collective_rpc", "self.response_mqs"),
    ("vllm.v1.executor.multiproc_executor", "MultiprocExecutor.collective_rpc", ".dequeue("),
    ("vllm.v1.executor.multiproc_executor", "MultiprocExecutor.collective_rpc", "raise RuntimeError("),
    ("vllm.v1.engine.core", "EngineCore.__init__", "load_general_plugins()"),
    ("vllm.v1.engine.core", "EngineCore.__init__", "self.step_fn ="),
    ("vllm.v1.engine.core", "EngineCore.sleep", "model_executor.sleep(level)"),
    ("vllm.v1.engine.core", "EngineCoreProc._handle_client_request", "self.add_request("),
    ("vllm.v1.engine.core", "DPEngineCoreProc.add_request", "super().add_request("),
    ("vllm.v1.engine.core_client", "InprocClient.add_request", "self.engine_core.add_request("),
    ("vllm.v1.engine.core_client", "InprocClient.collective_rpc", "self.engine_core.collective_rpc("),
    ("vllm.v1.engine.core_client", "InprocClient.get_output", "self.engine_core.step_fn()"),
    ("vllm.v1.engine.llm_engine", "LLMEngine.add_request", "self.output_processor.add_request("),
    ("vllm.v1.worker.worker_base", "WorkerWrapperBase.init_worker", "load_general_plugins()"),
]


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
        found = [node for node in ast.iter_child_nodes(tree) if isinstance(node, kinds) and node.name == step]
        assert found, f"{name}: no {step}"
        tree = found[-1]
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


@pytest.mark.parametrize("module", USED)
def test_what_the_plugin_uses_beside_them_is_there(module: str) -> None:
    tree = source(module)
    assert all(find(tree, name) for name in USED[module])


@pytest.mark.parametrize(("module", "function", "call"), CALLERS)
def test_what_is_replaced_is_called(module: str, function: str, call: str) -> None:
    text = " ".join(ast.unparse(find(source(module), function)).split())
    assert call in text


def test_a_failed_answer_is_raised_and_a_good_one_read_on() -> None:
    """`answers.py` drains what a failure left: the loop has to read one queue after the other and raise at the first failure."""
    point = POINTS["executor"]
    reads = [node for node in ast.walk(find(source(point.module), point.name)) if isinstance(node, ast.For)]
    assert any("dequeue" in ast.unparse(loop) and "raise RuntimeError" in ast.unparse(loop) for loop in reads)


@pytest.mark.parametrize("name", OWN_PLANS)
def test_engines_with_plans_of_their_own_are_there(name: str) -> None:
    assert (root() / "distributed" / "weight_transfer" / f"{name}.py").is_file()


@pytest.mark.parametrize("name", ["ipc_engine", "nccl_engine"])
def test_tracked_engines_begin_and_end_with_vllms_layerwise_reload(name: str) -> None:
    text = (root() / "distributed" / "weight_transfer" / f"{name}.py").read_text()
    assert "initialize_layerwise_reload(self.model)" in text
    assert "finalize_layerwise_reload(self.model, self.model_config)" in text
    assert "self.model.load_weights" in text
