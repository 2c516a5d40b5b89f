"""The direction of imports, and what must not be imported at all."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "probe_cli"

BASE = {"errors", "dtypes", "topology", "collecting", "_version"}
MANIFEST = BASE | {"checkpoint", "manifest"}
#: Part of the package -> the parts that it may import. Data flows one way.
ALLOWED = {
    **dict.fromkeys(BASE, BASE),
    "checkpoint": BASE | {"checkpoint"},
    "manifest": MANIFEST,
    "config": BASE | {"config"},
    "engines.base": MANIFEST | {"engines.base"},
    "model": MANIFEST | {"engines.base", "model"},
    "probe": MANIFEST | {"engines.base", "model", "probe"},
    "engines.registry": MANIFEST | {"engines.base", "engines.registry"},
    "engines": MANIFEST | {"engines.base", "engines.registry", "model", "probe"},
    # Its plugin puts the runtime into serving processes.
    "engines.vllm": MANIFEST | {"engines.base", "engines.vllm", "model", "probe", "reload"},
    "reload": MANIFEST | {"engines.base", "model", "reload"},
    "report": MANIFEST | {"report"},
}
#: Modules that import neither torch nor an engine when they are imported.
TORCH_FREE = ("checkpoint", "manifest", "report", "cli")


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


def part_of(name: str) -> str:
    """`probe_cli.engines.vllm.target` -> `engines.vllm`; `probe_cli.manifest.keys` -> `manifest`."""
    parts = name.split(".")[1:]
    if not parts:
        return ""
    return ".".join(parts[:2]) if parts[0] == "engines" else parts[0]


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import but those for type checking alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.lineno, node.module or ""
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name


def test_imports_flow_one_way() -> None:
    wrong = []
    for path in modules():
        own = part_of(dotted(path))
        if own in ("", "cli", "__main__"):
            continue
        allowed = ALLOWED.get(own, ALLOWED["engines"] | {own} if own.startswith("engines") else None)
        assert allowed is not None, f"{path}: a new part of the package; say above what it may import"
        for line, module in imports(path):
            if module.split(".")[0] == "probe_cli" and part_of(module) not in allowed | {""}:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert wrong == []


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
def test_only_its_own_engine_imports_an_engine(engine: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in modules()
        if not dotted(path).startswith((f"probe_cli.engines.{engine}", f"probe_cli.{engine}_plugin"))
        for line, module in imports(path)
        if module.split(".")[0] == engine and not (engine == "transformers" and "engines" in path.parts)
    ]
    assert wrong == []


def test_torch_is_not_imported_where_it_is_not_needed() -> None:
    names = [dotted(path) for path in modules() if part_of(dotted(path)) in {*TORCH_FREE, *BASE, "config"}]
    assert len(names) > 40
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'numpy', 'vllm', 'transformers'}.intersection(sys.modules)\n"
        "    if heavy: sys.exit(f'{name} imports {heavy}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_files_are_small() -> None:
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in modules()}
    assert {str(path.relative_to(ROOT)): size for path, size in sizes.items() if size > 500} == {}
    assert sorted(sizes.values())[len(sizes) // 2] < 200


def test_public_names_come_first() -> None:
    """Every module with definitions of its own says what is public, before the definitions."""
    wrong = []
    for path in modules():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        defines = [n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
        exported = [
            n for n in tree.body if isinstance(n, ast.Assign) and any(ast.unparse(t) == "__all__" for t in n.targets)
        ]
        if defines and path.name != "__main__.py" and (not exported or exported[0].lineno > defines[0].lineno):
            wrong.append(str(path.relative_to(ROOT)))
    assert wrong == []
