"""State that leaves one process and goes on in another, or is refused there by version."""

from __future__ import annotations

from typing import Any, Final

import pytest

from support.mlx_environments import GENERATIONS, answer

NAMES: Final = ("deepseek_v32", "falcon_h1", "gemma3", "llama")
PAIRS: Final = [(source, target) for source in GENERATIONS for target in GENERATIONS]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    """A folder with models and states, and what followed in the processes that exported."""
    root = tmp_path_factory.mktemp("models")
    answer("meta", "write", str(root), *NAMES, cwd=root)
    return root, {it: answer(it, "export", str(root), it, cwd=root) for it in GENERATIONS}


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_the_same_version_goes_on_bit_for_bit_and_another_refuses(
    source: str, target: str, exported: tuple[Any, dict[str, Any]]
) -> None:
    root, wanted = exported
    found = answer(target, "import", str(root), source, cwd=root)
    assert found.keys() == set(NAMES)
    if source == target:
        for name in NAMES:
            assert found[name]["as it is"] == found[name]["allowed"] == wanted[source][name]
        return
    for name in NAMES:
        told = found[name]["as it is"]
        for generation, version in GENERATIONS.items():
            assert f"mlx-lm {version} ({generation})" in told
    # What the two compute alike goes on, once a user says so; what changed shape never does.
    for name in ("falcon_h1", "gemma3", "llama"):
        assert found[name]["allowed"] == wanted[target][name] == wanted[source][name]
    assert "an array of" in found["deepseek_v32"]["allowed"]
