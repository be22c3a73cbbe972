"""Environments that install on their own: the tested pairs, for every platform and Python."""

from __future__ import annotations

import sys
import types

import pytest

from superfluid_adapter_mlx import recipes
from superfluid_adapter_mlx.recipes import TESTED, plan, versions
from superfluid_compat.errors import Unsupported

PLATFORMS = {"linux-x86_64": ("cpu", "mlx-cpu"), "darwin-arm64": ("metal", "mlx-metal")}
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine that takes whatever is set."""
    monkeypatch.setattr(recipes, "_macos", lambda: 14)
    return monkeypatch


def _be(patch: pytest.MonkeyPatch, platform: str, python: str = "3.11") -> None:
    patch.setattr(recipes, "here", lambda: platform)
    patch.setattr(recipes, "_python", lambda: python)
    patch.setattr(recipes, "sys", types.SimpleNamespace(platform=platform.partition("-")[0]))


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_tested_pair_is_pinned_whole(
    on: pytest.MonkeyPatch, platform: str, python: str
) -> None:
    _be(on, platform, python)
    backend, engine = PLATFORMS[platform]
    assert [(it.version, it.backend, it.here) for it in versions()] == [
        (mlx_lm, backend, None) for _, mlx_lm in TESTED
    ]
    for mlx, mlx_lm in TESTED:
        wheels = plan(mlx_lm, backend).environment
        pinned = {it.name: it.version for it in wheels}
        assert len(pinned) == len(wheels), "one version of each"
        assert (pinned["mlx"], pinned[engine], pinned["mlx-lm"]) == (mlx, mlx, mlx_lm)
        assert {"jinja2", "msgspec", "numpy", "tokenizers", "transformers"} <= pinned.keys()
        assert all(len(it.sha256) == 64 and it.size > 0 for it in wheels)


@pytest.mark.parametrize(
    ("platform", "python", "reason"),
    [
        ("linux-aarch64", "3.11", "no build for linux-aarch64, wanted linux-x86_64 or darwin"),
        ("darwin-x86_64", "3.11", "no build for darwin-x86_64"),
        ("linux-x86_64", "3.15", "no environment is pinned for Python 3.15"),
    ],
)
def test_where_none_installs_it_says_why(
    on: pytest.MonkeyPatch, platform: str, python: str, reason: str
) -> None:
    _be(on, platform, python)
    assert all(reason in (it.here or "") for it in versions())
    with pytest.raises(Unsupported, match=reason):
        plan(TESTED[0][1], "")


def test_a_macos_that_is_too_old_for_the_wheels_is_refused(on: pytest.MonkeyPatch) -> None:
    _be(on, "darwin-arm64")
    on.setattr(recipes, "_macos", lambda: 13)
    with pytest.raises(Unsupported, match="need macOS 14"):
        plan(TESTED[0][1], "metal")


@pytest.mark.parametrize(("version", "backend"), [("0.30.0", "cpu"), ("0.32.2", "cuda")])
def test_what_is_not_offered_is_refused_by_name(
    on: pytest.MonkeyPatch, version: str, backend: str
) -> None:
    _be(on, "linux-x86_64")
    with pytest.raises(Unsupported, match=f"no mlx-lm {version} {backend} for linux-x86_64"):
        plan(version, backend)


def test_this_machine_is_named_as_recipes_name_it() -> None:
    assert recipes.here().startswith(f"{sys.platform}-")
