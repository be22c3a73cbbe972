"""A worker under another interpreter: our packages reach it, and nothing else of the daemon's.

    PYTHON -I bridge.py JSON [the arguments of superfluid-workerd]

JSON is `{"packages": {name: folder}, "distributions": [[name, version, entry points]]}`: where each
of our packages lies, and what metadata says of them. Standard library only.
"""

from __future__ import annotations

import importlib.util
import json
import runpy
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Final

NEEDED: Final = ("jinja2", "msgspec", "numpy")
"""What the kit imports and every environment must hold itself."""

_EXIT: Final = 4
"""`ExitCode.RUNTIME`, which cannot be imported yet."""


class BorrowedDistribution(Distribution):
    """The metadata of a distribution that is not in this environment."""

    def __init__(self, name: str, version: str, entry_points: str) -> None:
        self._files = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "entry_points.txt": entry_points,
        }

    def read_text(self, filename: str) -> str | None:
        return self._files.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path(path)


class BorrowedPackages(DistributionFinder):
    """Finds the packages it was told of, and their distributions; before all other finders."""

    def __init__(
        self, packages: Mapping[str, str], distributions: Sequence[BorrowedDistribution]
    ) -> None:
        self._packages = dict(packages)
        self._distributions = distributions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        place = self._packages.get(fullname)
        if place is None:
            return None
        if place.endswith(".py"):
            return importlib.util.spec_from_file_location(fullname, place)
        return importlib.util.spec_from_file_location(
            fullname, Path(place, "__init__.py"), submodule_search_locations=[place]
        )

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        wanted = context.name if context is not None else None
        return [each for each in self._distributions if wanted in (None, each.name)]


def refuse_without(packages: Mapping[str, str]) -> None:
    """Leave with a refusal where this environment lacks what the kit needs, and name with it what
    it lacks of what the modules `needs.py` of `packages` tell of."""
    if not _lacking(NEEDED):
        return
    wanted: dict[str, str] = {name: name for name in NEEDED}
    for place in packages.values():
        told = Path(place, "needs.py")
        if told.is_file():
            wanted |= runpy.run_path(str(told))["MODULES"]
    lacking = _lacking(wanted)
    refusal = {
        "code": "runtime_broken",
        "message": f"the environment of {sys.executable} lacks {', '.join(lacking)}",
        "fix": f"run {sys.executable} -m pip install "
        + shlex.join(wanted[name] for name in lacking),
    }
    print(json.dumps(refusal), flush=True)
    sys.exit(_EXIT)


def _lacking(modules: Iterable[str]) -> list[str]:
    return [name for name in modules if importlib.util.find_spec(name) is None]


def main() -> None:
    """Make the packages known, then become the worker."""
    given = json.loads(sys.argv.pop(1))
    refuse_without(given["packages"])
    distributions = [BorrowedDistribution(*each) for each in given["distributions"]]
    sys.meta_path.insert(0, BorrowedPackages(given["packages"], distributions))

    from superfluid_workerd.entry import main as work

    work()


if __name__ == "__main__":
    main()
