"""Run sections, print their rows as they come, write everything as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console

from bench import machine
from bench.rows import Bench, Row

SECTIONS: Final = (
    "start",
    "decode",
    "native",
    "llamacpp",
    "mlx",
    "sampling",
    "lanes",
    "supervision",
    "kernels",
)
"""Modules of this package with `rows(bench) -> Iterator[Row]`, in the order they run."""
_ROOT: Final = Path(__file__).parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 when a section could not be measured."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument(
        "sections",
        nargs="*",
        metavar="SECTION",
        help=", ".join(SECTIONS) + "; SECTION:PART... for parts of one",
    )
    parser.add_argument("--quick", action="store_true", help="fewer samples, smaller files")
    parser.add_argument("--json", type=Path, help="where to write (bench-results/ by default)")
    call = parser.parse_args(arguments)
    unknown = sorted({section.partition(":")[0] for section in call.sections} - set(SECTIONS))
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    folder = _ROOT / ".cache" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(folder, call.quick)
    facts = machine.describe()
    name = facts["date"].replace(":", "") + ".json"
    report: dict[str, Any] = {"machine": facts, "quick": call.quick, "sections": {}, "failed": {}}
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{facts['cpu']}, {facts['cores']} cores, load {facts['load_per_core']} a core")
    for section in call.sections or SECTIONS:
        console.print(f"\n[bold]{section}[/]")
        report["sections"][section] = rows = []
        try:
            for row in _rows(section, bench):
                rows.append({**msgspec.to_builtins(row), "median": row.median})
                console.print(row.line(), markup=False)
        except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
            report["failed"][section] = f"{type(error).__name__}: {error}"
            console.print(f"  not measured: {report['failed'][section]}", markup=False)
    target = call.json or _ROOT / "bench-results" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    console.print(f"\n{target}", markup=False)
    return 1 if report["failed"] else 0


def _rows(section: str, bench: Bench) -> Iterator[Row]:
    name, *parts = section.split(":")
    module = importlib.import_module(f"bench.{name}")
    if parts and not hasattr(module, "PARTS"):
        raise ValueError(f"{name} has no parts")
    found: Iterator[Row] = module.rows(dataclasses.replace(bench, parts=tuple(parts)))
    return found


if __name__ == "__main__":
    sys.exit(main())
