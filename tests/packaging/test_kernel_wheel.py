"""The wheel of kda-sm90-kernels: its contents, and a call that it serves in a process without the DSL."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl: no kernel could be compiled")

from helpers.exported_kernels import write
from helpers.wheelhouse import ROOT, build_wheel, copy_project

from kda_cute.merge import MERGE, MergeConfig

PROJECT = ROOT / "packages" / "kda-sm90-kernels"
FOLDER = Path("src", "kda_sm90_kernels")

SERVED = """
import sys
import torch

sys.path.insert(0, {site!r})
sys.path.append({tests!r})
for name in ("cutlass", "tvm_ffi"):
    sys.modules[name] = None

from helpers.fake_cuda import FakeDriver
from kda_cute import cache_info
from kda_cute.host import merge_segments
from kda_cute.store import search

driver = FakeDriver()
search.current = lambda: driver


class OnGpu(torch.Tensor):
    def get_device(self):
        return 0


states = torch.zeros(4, 3, 128, 128).as_subclass(OnGpu)
merge_segments(states, states, states, torch.tensor([0, 2, 4], dtype=torch.int32), sms=132, arch="sm_90a")
print(cache_info().exported, driver.cuda.launches[0].grid)
print([folder.origin for folder in search.KernelStore.of_this_process().folders])
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project without kernels."""
    target = copy_project(PROJECT, tmp_path / "project")
    shutil.rmtree(target / FOLDER / "sm_90a", ignore_errors=True)
    return target


def test_a_wheel_serves_calls_without_the_dsl(project, tmp_path, monkeypatch):
    write(project / FOLDER, (MERGE, MergeConfig(8), "sm_90a"))
    (tmp_path / "wheels").mkdir()
    wheel = build_wheel(project, tmp_path / "wheels")
    version = metadata.version("kda-core")  # one version for all packages
    assert wheel.name == f"kda_sm90_kernels-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("kda_sm90_kernels/")]
        archive.extractall(tmp_path / "site")
    assert len(names) == 3 and "kda_sm90_kernels/sm_90a/manifest.json" in names
    monkeypatch.delenv("KDA_KERNEL_DIR", raising=False)
    program = SERVED.format(site=str(tmp_path / "site"), tests=str(ROOT / "tests"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["1 (2, 3, 16)", f"['kda-sm90-kernels {version}']"]


def test_a_wheel_without_its_kernels_is_not_built(project, tmp_path):
    (tmp_path / "wheels").mkdir()

    def problem() -> str:
        with pytest.raises(AssertionError, match="nox -s kernels") as caught:
            build_wheel(project, tmp_path / "wheels")
        return str(caught.value)

    assert "manifest.json does not exist" in problem()
    folder = write(project / FOLDER, (MERGE, MergeConfig(8), "sm_90a"))
    manifest = folder / "manifest.json"
    content = json.loads(manifest.read_text())
    (folder / content["kernels"][0]["file"]).write_bytes(b"")
    assert "is damaged" in problem()
    (folder / "another").touch()
    assert "expected 1 files that the manifest lists, found 2" in problem()
