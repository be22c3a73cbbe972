"""Real engines killed at random under load: every stream is one text, each character of it once.

Logits of llama.cpp and MLX move in their last bits with what else is in the batch, so a draw may
fall the other way; from there on the stream still is what the engine says after what went out.
llama.cpp's fused attention moves them a hundred times as far and is off here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from superfluid.supervisor.host import ModelSpec
from support.house import Open
from support.kills import PATIENT, SOAK, Killer, requests, spec_of, turns_of, undisturbed
from support.llama_libraries import INSTALLED, library
from support.mlx_environments import GENERATIONS, HOME, answer, interpreter
from support.tiny_models import TinyModel, write_model

MOST_TURNS: Final = 0.002
"""Draws that may fall the other way, to all: they differ by what the last bits of logits decide."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A runtime and how to get a tiny model for it; `turns` is whether its logits may move."""

    runtime: str
    write: Callable[[Path], Path]
    turns: bool
    options: Mapping[str, object] = field(default_factory=dict)
    home: Path | None = None

    async def spec(self, folder: Path) -> ModelSpec:
        home = folder / "home"
        home.mkdir()
        if self.home is not None:
            (home / "data").mkdir()
            (home / "data" / "runtimes").symlink_to(self.home / "data" / "runtimes")
        model = self.write(folder)
        return await spec_of(home, model, self.runtime, self.options, lanes="4", threads="1")


def gguf(folder: Path) -> Path:
    return write_model(folder / "m.gguf", TinyModel())


def mlx(generation: str) -> Engine:
    def write(folder: Path) -> Path:
        made = folder / "models"
        made.mkdir()
        answer(generation, "write", str(made), "llama", cwd=made)
        return made / "llama"

    interpreter(generation)
    return Engine(f"mlx@{GENERATIONS[generation]}", write, True, {"compile": "false"}, HOME)


ENGINES: Final[Mapping[str, Callable[[], Engine]]] = {
    "native": lambda: Engine("native", gguf, False, {"exact": "true"}),
    "llamacpp": lambda: Engine(
        "llamacpp", gguf, True, {"lib": str(library(INSTALLED)), "flash-attn": "off"}
    ),
    **{f"mlx-{name}": lambda name=name: mlx(name) for name in GENERATIONS},  # type: ignore[misc]  # bound now
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("kills", "seed"), [(6, 8), *SOAK])
async def test_random_kills_leave_every_stream_whole(
    engine: str, kills: int, seed: int, house: Open, tmp_path: Path
) -> None:
    chosen = ENGINES[engine]()
    spec = await chosen.spec(tmp_path)
    wanted = requests()
    served = house(spec=spec, limits=PATIENT)
    alone = await undisturbed(served, wanted)
    killer = Killer(served, wanted, seed)
    await killer.run(kills)
    turns = drawn = 0
    for request, answers, same in zip(wanted, killer.answers, alone, strict=True):
        for heard in answers:
            turns += await turns_of(served, request, heard, same)
            drawn += len(heard.tokens)
    answers_given = sum(map(len, killer.answers))
    print(f"{kills} kills, {answers_given} answers, {turns} of {drawn} draws fell the other way")
    assert turns <= (MOST_TURNS * drawn if chosen.turns else 0)
