"""The stand-in for the driver's library: written without a compiler, loaded by the system's own loader."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from probe_cli.engines.vllm.stub import SONAME, driver_is_installed, stub_bytes
from probe_cli.errors import EngineError

linux = pytest.mark.skipif(sys.platform != "linux", reason="ELF is Linux's")
_LOAD = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, env=environment or None
    )


@linux
def test_the_loader_takes_it(tmp_path: Path) -> None:
    file = tmp_path / "stub.so"
    file.write_bytes(stub_bytes(platform.machine()))
    done = run(_LOAD, str(file))
    assert (done.returncode, done.stderr) == (0, "")


@linux
@pytest.mark.skipif(driver_is_installed(), reason="the real driver is there")
def test_what_is_loaded_later_finds_it_by_its_soname() -> None:
    code = (
        "import ctypes\nfrom probe_cli.engines.vllm.stub import load_stub\nload_stub()\nload_stub()\n"
        f"ctypes.CDLL({SONAME!r})\nprint('found')"
    )
    assert run(f"import ctypes; ctypes.CDLL({SONAME!r})").returncode != 0
    assert run(code).stdout == "found\n"


@linux
@pytest.mark.skipif(driver_is_installed(), reason="the real driver is there")
def test_nothing_is_left_behind(tmp_path: Path) -> None:
    done = run("from probe_cli.engines.vllm.stub import load_stub; load_stub()", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


@linux
@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
@pytest.mark.parametrize(("machine", "named"), [("x86_64", "X86-64"), ("aarch64", "AArch64")])
def test_it_is_a_shared_object_of_its_machine_with_that_name(tmp_path: Path, machine: str, named: str) -> None:
    file = tmp_path / "stub.so"
    file.write_bytes(stub_bytes(machine))
    text = subprocess.run(["readelf", "-hdlW", file], capture_output=True, text=True, check=True).stdout
    assert named in text
    assert f"Library soname: [{SONAME}]" in text
    assert "NEEDED" not in text
    assert "RWE" not in text, "no segment is writable and executable"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_same_bytes_every_time(machine: str) -> None:
    assert stub_bytes(machine) == stub_bytes(machine)
    assert stub_bytes(machine)[:4] == b"\x7fELF"
    assert len(stub_bytes(machine)) < 1024


def test_a_machine_without_a_cuda_build_is_named() -> None:
    with pytest.raises(EngineError, match="no CUDA build of vLLM for riscv64 hosts"):
        stub_bytes("riscv64")
