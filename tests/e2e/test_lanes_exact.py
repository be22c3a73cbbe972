"""Many streams on a few lanes of the native runtime in its exact mode, over HTTP with `openai`."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from superfluid_workerd.link.frames import GenerationRequest, Sampling, Text
from support.openai_streams import clients, idle, told
from support.server import serving
from support.tiny_models import TinyModel, write_model

LANES = 8
CLASSES = ("interactive", "completion", "agent", "background")
WORDS = ("lanes", "turn", "by", "carry", "what", "streams", "ask", "no", "hears", "of", "another")
LONG = 3000
"""Tokens that a stream asks for whose client goes."""


def _asked(dice: random.Random, number: int, *, leaves: bool) -> GenerationRequest:
    """A third begins alike, for what is kept and copied."""
    head = " ".join(WORDS) if number % 3 == 0 else ""
    words = dice.choices(WORDS, k=dice.randint(1, 12))
    return GenerationRequest(
        prompt=Text(text=" ".join([head, *words])),
        max_tokens=LONG if leaves else dice.randint(8, 20),
        sampling=Sampling(seed=number, temperature=0.8),
        service_class=CLASSES[number % 4],  # type: ignore[arg-type]  # a Class each
    )


@pytest.mark.timeout(300)
async def test_sixty_four_streams_a_third_dropped_and_the_others_as_if_alone(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = write_model(tmp_path / "m.gguf", TinyModel(context=4096))
    home = tmp_path_factory.getbasetemp() / "lanes-native-home"
    dice = random.Random(11)
    leaves = {n: dice.randint(0, 7) for n in dice.sample(range(64), 21)}
    asks = [_asked(dice, n, leaves=n in leaves) for n in range(64)]
    arguments = [str(model), "--name", "m", "--lanes", str(LANES), "--context", "4096"]
    with serving([*arguments, "--native-exact", "true"], home) as server:
        async with clients(server) as client:
            together = await asyncio.gather(
                *(told(client, ask, leaves.get(n)) for n, ask in enumerate(asks))
            )
            stats = await idle(server, LANES)
            alone = [await told(client, ask, leaves.get(n)) for n, ask in enumerate(asks)]
        after = await idle(server, LANES)
    assert together == alone
    assert len(set(alone)) > 40, "the model says the same to everybody"
    kept = sum(ask.max_tokens or 0 for n, ask in enumerate(asks) if n not in leaves)
    assert stats["decode_tokens"] < kept + 21 * LONG / 2, "the dropped ones went on"
    assert stats["mean_occupancy"] > 3
    assert (stats["failed_turns"], after["parked"], after["parked_bytes"]) == (0, 0, 0)
