"""What installs on its own: which builds, for whom, and what is done with what was staged."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from superfluid_adapter_llamacpp import adapter, probe, recipes
from superfluid_adapter_llamacpp.contracts import contracts, known, served
from superfluid_adapter_llamacpp.probe import Finding
from superfluid_adapter_llamacpp.recipes import RECIPES, backend_of, finish, versions
from superfluid_compat.errors import RuntimeBroken, Unsupported
from superfluid_compat.verdicts import Rule
from superfluid_workerd.adapter import Device, InstallPlan, Wheel
from superfluid_workerd.registry import checked_options

PLATFORMS = ("linux-x86_64", "linux-aarch64", "darwin-aarch64")
DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}.86.10  Wed Oct 1 12:00:00 UTC 2026\n"


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A Linux on x86-64 without any GPU; the file that would name NVIDIA's driver."""
    driver = tmp_path / "driver"
    monkeypatch.setattr(recipes, "here", lambda: "linux-x86_64")
    monkeypatch.setattr(recipes, "_NVIDIA", driver)
    monkeypatch.setattr(recipes, "_VULKAN", ())
    monkeypatch.setattr(recipes, "_AMD", tmp_path / "kfd")
    return driver


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_platform_has_a_build_of_each_newest_contract(platform: str) -> None:
    offered = {one.contract for one in RECIPES if one.platform == platform}
    assert {7, 8} <= offered <= set(served())


def test_every_artifact_is_pinned_and_every_build_is_of_its_contract() -> None:
    for one in RECIPES:
        assert one.build in contracts()[one.contract].builds
        for artifact in one.artifacts:
            assert re.fullmatch("[0-9a-f]{64}", artifact.sha256)
            assert artifact.size > 1 << 20


def test_without_a_gpu_the_newest_for_the_processor_comes_first(on: Path) -> None:
    found = [(one.version, one.backend) for one in versions() if one.here is None]
    assert found == [("b11549", "cpu"), ("b11284", "cpu"), ("b11063", "cpu")]
    reasons = {one.backend: one.here for one in versions() if one.here is not None}
    assert reasons["cuda-13.4"] == "no NVIDIA driver is here"


@pytest.mark.parametrize(
    ("driver", "first"),
    [(590, ["cuda-13.4", "cuda-12.8"]), (575, ["cuda-12.8"]), (535, [])],
)
def test_cuda_is_chosen_by_the_driver(driver: int, first: list[str], on: Path) -> None:
    on.write_text(DRIVER.format(driver))
    here = [one for one in versions() if one.here is None]
    assert [one.backend for one in here if one.backend.startswith("cuda")] == first
    tried = [one.backend for one in here if one.version == here[0].version]
    assert tried[: len(first)] == first


def test_where_rocms_driver_is_it_is_said_that_no_build_is_pinned(on: Path) -> None:
    assert [one for one in versions() if one.backend == "rocm"] == []
    assert adapter().plan("b11549", "cpu").notes == ()
    on.with_name("kfd").touch()
    (row,) = [one for one in versions() if one.backend == "rocm"]
    assert (row.version, row.contract) == ("b11284", 7)
    said = "no ROCm build is pinned by digest, one of your own installs with --from"
    assert row.here == said
    assert adapter().plan("b11549", "cpu").notes == (said,)
    assert versions()[0].backend == "cpu"
    with pytest.raises(Unsupported):
        adapter().plan("b11284", "rocm")


def test_another_platform_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "here", lambda: "linux-riscv64")
    assert all(one.here for one in versions())
    with pytest.raises(Unsupported):
        adapter().plan("b11549", "cpu")


def test_a_plan_is_the_recipes(on: Path) -> None:
    found = adapter().plan("b11063", "")
    assert (found.version, found.backend) == ("b11063", "cpu")
    (wheel,) = found.artifacts
    assert isinstance(wheel, Wheel)
    assert (wheel.name, wheel.version) == ("xllamacpp", "2026.9.11063")


def test_what_came_in_folders_of_its_own_is_laid_beside_the_library(tmp_path: Path) -> None:
    for name in ("llama-b1/libllama.so", "llama-b1/libggml.so", "cudart/lib/libcudart.so.12"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    finish(InstallPlan(version="b1", backend="cuda-12.8"), tmp_path)
    beside = {path.name for path in (tmp_path / "llama-b1").iterdir()}
    assert beside == {"libllama.so", "libggml.so", "libcudart.so.12"}
    assert backend_of(tmp_path) == "cuda-12.8"


def test_nothing_that_could_be_loaded_is_no_install(tmp_path: Path) -> None:
    (tmp_path / "README").touch()
    with pytest.raises(RuntimeBroken, match="a folder in which no libllama lies"):
        finish(InstallPlan(version="b1"), tmp_path)
    assert backend_of(tmp_path) == ""


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_gpus_install_that_finds_none_gives_way(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libllama.so").touch()
    finish(InstallPlan(version="b11284", backend="cuda-12.8"), tmp_path)
    finding = Finding(
        path="libllama.so", contract=7, version="b11284", devices=(Device(name="it", kind=kind),)
    )
    monkeypatch.setattr(probe, "examine", lambda named, cache: finding)
    llama = adapter()
    llama.installed = tmp_path
    found = llama.check(checked_options(llama, {}), tmp_path)
    if kind == "cpu":
        assert found.rule == Rule.NO_DEVICE
    else:
        assert (found.problem, found.tested, found.abi) == (None, False, 7)


def test_the_page_lists_the_contracts_as_they_are() -> None:
    page = (Path(__file__).parents[3] / "docs" / "llamacpp-runtime.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \| (yes|no) \| ([^|]+) \|$", page, re.M)

    def told(builds: Iterable[str]) -> str:
        return ", ".join(dict.fromkeys(builds)) or "none"

    assert [tuple(row) for row in rows] == [
        (
            str(number),
            told(one.builds),
            "yes" if one.served else "no",
            told(it.build for it in known().values() if it.contract == number),
        )
        for number, one in sorted(contracts().items(), reverse=True)
    ]
