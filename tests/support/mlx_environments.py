"""The environments that the installer made for each tested version, and pytest run inside them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from support.server import run

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".cache" / "test-home"
GENERATIONS = {"meta": "0.31.3", "plain": "0.32.2"}
"""mlx-lm's version by how its caches keep their state."""

VERSIONS = {**GENERATIONS, "first-plain": "0.32.0"}
"""Every tested one by a short name; the first of its generation is tried by what matters most."""

_OURS = ("superfluid_compat", "superfluid_workerd", "superfluid_adapter_mlx")
_LENT = (
    *_OURS, "py", "pytest", "_pytest", "pluggy", "iniconfig", "pytest_timeout",
)  # fmt: skip
_START = """
import json, runpy, sys
lent = json.loads(sys.argv.pop(1))
bridge = runpy.run_path(lent["bridge"], run_name="bridge")
borrowed = [bridge["BorrowedDistribution"](*each) for each in lent["distributions"]]
sys.meta_path.insert(0, bridge["BorrowedPackages"](lent["packages"], borrowed))
sys.path.append(lent["linked"])
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def interpreter(generation: str) -> Path:
    """The environment's Python, which the product's installer makes unless it stands."""
    version = VERSIONS[generation]
    installs = HOME / "data" / "runtimes" / "mlx"
    if not any(installs.glob(f"{version}-*")):
        done = run(["runtime", "install", "mlx", "--version", version], HOME, timeout_s=900)
        assert done.code == 0, done.err
    return next(installs.glob(f"{version}-*")) / "venv" / "bin" / "python"


def inside(generation: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a module and its arguments under the environment's Python, which is lent our packages,
    the tests' support and pytest, as a worker is lent ours."""
    linked = cwd.parent / f"{cwd.name}-linked"
    linked.mkdir(exist_ok=True)
    lent = _lent()
    for name in _OURS:
        # For a Python that a test starts itself, which gets the path and not the finder.
        if not (linked / name).exists():
            (linked / name).symlink_to(lent["packages"][name])
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    return subprocess.run(
        [
            str(interpreter(generation)),
            "-I",
            "-c",
            _START,
            json.dumps({**lent, "linked": str(linked)}),
            *arguments,
        ],
        env={**kept, "MLX_DISABLE_COMPILE": "1", "TMPDIR": str(cwd)},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def answer(generation: str, command: str, *arguments: str, cwd: Path) -> Any:
    """What `support.mlx_process` answers in a process of its own."""
    done = inside(generation, "support.mlx_process", command, *arguments, cwd=cwd)
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout.splitlines()[-1])


def _lent() -> dict[str, Any]:
    packages = {**dict(_folders()), "support": str(ROOT / "tests" / "support")}
    ours = distribution("superfluid")
    return {
        "bridge": str(Path(packages["superfluid_workerd"], "bridge.py")),
        "packages": packages,
        "distributions": [
            ("superfluid", ours.version, ours.read_text("entry_points.txt") or ""),
            ("pytest", distribution("pytest").version, ""),
        ],
    }


def _folders() -> Iterator[tuple[str, str]]:
    for name in _LENT:
        spec = importlib.util.find_spec(name)
        assert spec is not None, name
        yield name, (spec.submodule_search_locations or [str(spec.origin)])[0]
