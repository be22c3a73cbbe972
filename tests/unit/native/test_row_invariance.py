"""A token's logits are the same bits whatever is seated beside it and however its prompt was cut,
which the runtime promises (`row_invariant`) with and without `exact`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from superfluid_adapter_native.quants.types import BY_NAME
from superfluid_workerd.adapter import Feed, Runtime
from support.native_models import Logits, ignore, opened, whole
from support.tiny_models import TinyModel, write_model

LENGTH: Final = 37
STREAMS: Final = 5
CUTS: Final = ((37,), (1, 36), (4, 4, 5, 24), (16, 16, 5), (33, 3, 1))


def text(seed: int) -> list[int]:
    return [int(it) for it in np.random.default_rng(seed).integers(3, 300, LENGTH)]


def fed(runtime: Runtime, cuts: tuple[tuple[int, ...], ...]) -> list[Logits]:
    """Each stream's logits at every position, where in step n stream i takes `cuts[i][n]`."""
    seats = [runtime.seq_create() for _ in cuts]
    found: list[list[Logits]] = [[] for _ in cuts]
    for turn in range(max(map(len, cuts))):
        feeds = [
            Feed(seat, text(index)[start : start + own[turn]], start, "all")
            for index, (seat, own) in enumerate(zip(seats, cuts, strict=True))
            if turn < len(own)
            for start in [runtime.seq_length(seat)]
        ]
        for feed, rows in zip(feeds, runtime.step(feeds, ignore), strict=True):
            assert rows is not None
            found[seats.index(feed.sequence)].append(rows)
    for seat in seats:
        runtime.seq_free(seat)
    return [np.concatenate(rows) for rows in found]


@pytest.mark.parametrize("exact", [False, True], ids=["rounded", "exact"])
@pytest.mark.parametrize("kind", sorted(BY_NAME))
def test_company_and_cuts_change_no_bit(
    kind: str, exact: bool, tmp_path: Path, kernels: Path
) -> None:
    spec = TinyModel(
        "llama", width=256, heads=4, kv_heads=2, head_dim=64, ff=512, types={"*": kind}
    )
    path = write_model(tmp_path / "m.gguf", spec)
    with opened(path, kernels, exact=exact, lanes=STREAMS) as loaded:
        runtime = loaded.runtime
        assert runtime.describe().row_invariant
        (wanted,) = fed(runtime, ((1,) * LENGTH,))
        for cut in CUTS:
            assert np.array_equal(fed(runtime, (cut,))[0], wanted), cut
        # Every stream cut another way, so that each step has another composition.
        together = fed(runtime, CUTS)
        assert np.array_equal(together[0], wanted)
        for shift in range(1, STREAMS):
            turned = fed(runtime, (*CUTS[shift:], *CUTS[:shift]))
            assert all(map(np.array_equal, turned, together)), shift


@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen3moe"])
def test_nor_do_threads_or_streaming_with_any_cache(
    architecture: str, kv_type: str, tmp_path: Path, kernels: Path
) -> None:
    spec = TinyModel(
        architecture,  # type: ignore[arg-type]  # one of the Literal
        layers=7, width=128, head_dim=32, window=16, types={"*": "Q8_0"},
    )  # fmt: skip
    path = write_model(tmp_path / "m.gguf", spec)
    found = []
    for threads, cache_bytes in ((1, "auto"), (3, "auto"), (2, 0)):
        with opened(
            path, kernels, kv_type=kv_type, threads=threads, cache_bytes=cache_bytes, lanes=STREAMS
        ) as loaded:
            found.append(fed(loaded.runtime, CUTS))
            (alone,) = fed(loaded.runtime, ((1,) * LENGTH,))
            assert np.array_equal(alone, found[-1][0])
    assert all(map(np.array_equal, found[0] * 2, [*found[1], *found[2]]))


@pytest.mark.parametrize("architecture", ["phi3", "qwen2", "gemma3"])
def test_nor_does_what_was_written_down_before(
    architecture: str, tmp_path: Path, kernels: Path
) -> None:
    """Steps of few rows write a layer's calls down and make them again: for other sequences, past
    where the rotation's tables are replaced, and between passes of other sizes."""
    spec = TinyModel(
        architecture,  # type: ignore[arg-type]  # one of the Literal
        width=128, head_dim=32, window=16, context=1024, types={"*": "Q8_0"},
    )  # fmt: skip
    tokens = [int(it) for it in np.random.default_rng(3).integers(3, 300, 520)]
    path = write_model(tmp_path / "m.gguf", spec)
    with opened(path, kernels, lanes=3) as loaded:
        runtime = loaded.runtime
        wanted = whole(runtime, tokens)
        seats = [runtime.seq_create() for _ in range(2)]
        at = 0
        for count in itertools.cycle((1, 2, 4, 37, 1, 8)):
            part = tokens[at : at + count]
            feeds = [Feed(seat, part, at, "all") for seat in seats]
            for rows in runtime.step(feeds, ignore):
                assert rows is not None
                assert np.array_equal(rows, wanted[at : at + count])
            at += count
            if at >= len(tokens):
                break
