"""The default model on eight lanes: real text, against what each stream gets alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from superfluid_workerd.adapter import Feed, Runtime
from support.native_models import Logits, ignore, opened, whole
from support.server import Server, serving

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()
LANES = 8
TOLERANCE = 0.01
"""Of logits that span some fifty."""


def _prompts(count: int) -> list[str]:
    """Pieces of the text, of different lengths; every second one begins as all of those do."""
    return [TEXT[:600] * (n % 2) + TEXT[900 * n : 900 * n + 80 + 60 * n] for n in range(count)]


async def _answer(http: httpx.AsyncClient, prompt: str, tokens: int) -> str:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0.8, "seed": 3}
    answer = await http.post("/v1/completions", json={**body, "ignore_eos": True})
    text = answer.json()["choices"][0]["text"]
    assert isinstance(text, str)
    return text


async def _served(server: Server) -> tuple[list[str], list[str], dict[str, Any]]:
    """Each stream alone, then all together; the counters of the latter."""
    prompts = _prompts(LANES)
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as http:

        async def stats() -> dict[str, Any]:
            (found,) = (await http.get("/v1/superfluid/stats")).json()["models"].values()
            return dict(found)

        alone = [await _answer(http, prompt, 12 + n) for n, prompt in enumerate(prompts)]
        before = await stats()
        together = await asyncio.gather(
            *(_answer(http, prompt, 12 + n) for n, prompt in enumerate(prompts))
        )
        after = await stats()
    return alone, list(together), {name: after[name] - before[name] for name in after}


@pytest.mark.parametrize("cached", ["0", "1G"])
async def test_exact_streams_get_what_they_get_alone(
    cached: str, default_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = tmp_path_factory.getbasetemp() / "lanes-native-home"
    arguments = [str(default_model), "--lanes", str(LANES), "--context", "1024"]
    extra = {"SUPERFLUID_PREFIX_CACHE_BYTES": cached}
    with serving([*arguments, "--native-exact", "true"], home, **extra) as server:
        alone, together, counted = await _served(server)
    assert together == alone
    assert counted["seats"] / counted["turns"] > 3, "next to nothing was batched"
    assert counted["shared_tokens"] > 0


def test_fast_rows_are_within_tolerance_of_those_alone(
    default_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Prompts side by side in chunks, then tokens side by side, whatever else is seated."""
    kernels = tmp_path_factory.getbasetemp() / "lanes-native-kernels"
    kernels.mkdir(exist_ok=True)
    with opened(default_model, kernels, lanes=LANES, context=1024) as loaded:
        runtime, tokenizer = loaded.runtime, loaded.tokenizer
        texts = [tokenizer.encode(prompt)[: 40 + 9 * n] for n, prompt in enumerate(_prompts(LANES))]
        expected = []
        for text in texts:
            sequence = runtime.seq_create()
            runtime.step([Feed(sequence, text[:-6], 0, "none")], ignore)
            expected.append(whole(runtime, text[-6:], sequence))
            runtime.seq_free(sequence)
        found = _side_by_side(runtime, texts)
    for rows, wanted in zip(found, expected, strict=True):
        assert np.abs(rows - wanted).max() < TOLERANCE
        # Where the likeliest token is clear it is the same one.
        top = np.sort(wanted, axis=-1)
        clear = top[:, -1] - top[:, -2] > 2 * TOLERANCE
        assert (rows.argmax(-1) == wanted.argmax(-1))[clear].all()


def _side_by_side(runtime: Runtime, texts: Sequence[Sequence[int]]) -> list[Logits]:
    """Logits of each text's last six tokens: all but those in chunks, then one at a time."""
    sequences = [runtime.seq_create() for _ in texts]
    for start in range(0, max(map(len, texts)), 16):
        feeds = [
            Feed(sequence, text[start : min(start + 16, len(text) - 6)], start, "none")
            for sequence, text in zip(sequences, texts, strict=True)
            if start < len(text) - 6
        ]
        if feeds:
            runtime.step(feeds, ignore)
    rows: list[list[Logits]] = [[] for _ in texts]
    for back in range(6, 0, -1):
        feeds = [
            Feed(sequence, [text[-back]], len(text) - back)
            for sequence, text in zip(sequences, texts, strict=True)
        ]
        for kept, row in zip(rows, runtime.step(feeds, ignore), strict=True):
            assert row is not None
            kept.append(row[0])
    return [np.stack(each) for each in rows]
