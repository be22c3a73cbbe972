"""The vocabulary of a GGUF file: pieces, what each one is, and which ids play a part.

The rules are llama.cpp's (src/llama-vocab.cpp), since GGUF files are written for it: default ids
by tokenizer model, end-of-generation ids found by their text, and pieces whose kind is corrected
by their text.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from superfluid_adapter_native.tokenizers import metadata as read
from superfluid_compat.errors import ModelDamaged
from superfluid_workerd.tokenizing.pieces import END_OF_MESSAGE, END_OF_TURN, STOP_TEXTS


class Kind(enum.IntFlag):
    """What a piece is. A file gives one; corrections by text may add to it."""

    NONE = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 4
    USER_DEFINED = 8
    UNUSED = 16
    BYTE = 32


HIDDEN: Final = Kind.CONTROL | Kind.UNKNOWN
"""Kinds that are no text: unread in client text, and silent in output."""

_FILE_KINDS: Final = (
    Kind.NONE,
    Kind.NORMAL,
    Kind.UNKNOWN,
    Kind.CONTROL,
    Kind.USER_DEFINED,
    Kind.UNUSED,
    Kind.BYTE,
)

_FILE_ENDS: Final[dict[str, tuple[str, ...]]] = {
    "fim_pad_token_id": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep_token_id": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep_token_id": ("<|file_sep|>",),
}
_FILE_PARTS: Final[dict[tuple[str, ...], tuple[str, ...]]] = {
    ("fim_pre_token_id", "prefix_token_id"): (
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<｜fim▁begin｜>",  # noqa: RUF001
        "<PRE>",
        "▁<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
    ),
    ("fim_suf_token_id", "suffix_token_id"): (
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<｜fim▁hole｜>",  # noqa: RUF001
        "<SUF>",
        "▁<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
    ),
    ("fim_mid_token_id", "middle_token_id"): (
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<｜fim▁end｜>",  # noqa: RUF001
        "<MID>",
        "▁<MID>",
        "<|code_middle|>",
        "<|middle|>",
    ),
}
_ALWAYS_TEXT: Final = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a tokenizer model takes where the file is silent."""

    bos: int | None
    eos: int | None
    unk: int | None
    sep: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = False


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Pieces by id; `ids` is the way back. `kinds[id]` is a `Kind` as an int."""

    pieces: list[str]
    ids: dict[str, int]
    kinds: list[int]
    bos: int | None
    eos: int | None
    unk: int | None
    sep: int | None
    stops: frozenset[int]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool

    def silent(self, token: int) -> bool:
        """Whether output leaves the token out unless special tokens are asked for."""
        return bool(self.kinds[token] & HIDDEN)

    def of(self, kind: Kind) -> list[int]:
        """Ids of which any bit of `kind` is true, ascending."""
        wanted = int(kind)  # the enumeration's own `&` costs a hundred times an int's
        return [token for token, one in enumerate(self.kinds) if one & wanted]


def read_vocabulary(metadata: Mapping[str, Any], defaults: Defaults) -> Vocabulary:
    """The vocabulary that `metadata` describes, or `ModelDamaged` and why."""
    pieces = _pieces(metadata)
    ids = dict(zip(pieces, range(len(pieces)), strict=True))
    if len(ids) != len(pieces):
        twice = next(text for token, text in enumerate(pieces) if ids[text] != token)
        raise ModelDamaged(f"the vocabulary has the piece {twice!r} twice")
    size = len(pieces)
    kinds = _kinds(metadata, size)
    bos = read.token_id(metadata, "bos_token_id", size, defaults.bos)
    eos = read.token_id(metadata, "eos_token_id", size, defaults.eos)
    stops = _stops(metadata, ids, kinds, eos)
    return Vocabulary(
        pieces,
        ids,
        kinds,
        bos,
        eos,
        read.token_id(metadata, "unknown_token_id", size, defaults.unk),
        read.token_id(metadata, "seperator_token_id", size, defaults.sep),
        stops,
        _adds(metadata, "add_bos_token", defaults.add_bos, bos),
        _adds(metadata, "add_eos_token", defaults.add_eos, eos),
        read.flag(metadata, "add_space_prefix", defaults.add_space_prefix),
    )


def _adds(metadata: Mapping[str, Any], name: str, default: bool, token: int | None) -> bool:
    adds = read.flag(metadata, name, default and token is not None)
    if adds and token is None:
        raise ModelDamaged(f"{read.PREFIX}{name} is true, but the file names no such id")
    return adds


def _pieces(metadata: Mapping[str, Any]) -> list[str]:
    pieces = read.texts(metadata, "tokens")
    if not pieces:
        raise ModelDamaged("tokenizer.ggml.tokens is empty")
    if "" in pieces:
        pieces = [text or f"[EMPTY_{token}]" for token, text in enumerate(pieces)]
    return pieces


def _kinds(metadata: Mapping[str, Any], size: int) -> list[int]:
    types = read.numbers(metadata, "token_type", size)
    if types is None:
        return [int(Kind.NORMAL)] * size
    known = np.where((types >= 0) & (types < len(_FILE_KINDS)), types, 0).astype(np.intp)
    kinds: list[int] = np.array(_FILE_KINDS, np.int64)[known].tolist()
    return kinds


def _stops(
    metadata: Mapping[str, Any], ids: dict[str, int], kinds: list[int], eos: int | None
) -> frozenset[int]:
    """Ids that end a generation; pieces that look like control are made control on the way."""
    size = len(kinds)
    stops = {eos}
    for keys, known in _FILE_PARTS.items():
        _named(metadata, keys, known, ids, kinds)
    for key, known in _FILE_ENDS.items():
        stops.add(_named(metadata, (key,), known, ids, kinds))
    stops.add(_named(metadata, ("eot_token_id",), END_OF_TURN, ids, kinds))
    stops.add(_named(metadata, ("eom_token_id",), END_OF_MESSAGE, ids, kinds))
    by_text = {ids[text] for text in STOP_TEXTS if text in ids}
    for token in by_text:
        kinds[token] |= Kind.CONTROL
    for text in _ALWAYS_TEXT:
        if text in ids:
            kinds[ids[text]] = int(Kind.USER_DEFINED)
    found = {token for token in stops | by_text if token is not None and token < size}
    return frozenset(found - _no_stops(ids, found, kinds))


def _named(
    metadata: Mapping[str, Any],
    keys: tuple[str, ...],
    known: tuple[str, ...],
    ids: dict[str, int],
    kinds: list[int],
) -> int | None:
    """The id under one of `keys`, else the first of the `known` texts, made control."""
    for key in keys:
        stated = read.token_id(metadata, key, len(kinds), None)
        if stated is not None:
            return stated
    for text in known:
        if text in ids:
            kinds[ids[text]] |= Kind.CONTROL
            return ids[text]
    return None


def _no_stops(ids: dict[str, int], found: set[int], kinds: list[int]) -> set[int]:
    """Ids that look like stops but are not, beside others that tell the family."""

    def has(text: str) -> bool:
        return ids.get(text) in found

    spared = set()
    calls = has("<|call|>") or has("<|calls|>")
    if has("<|end|>") and calls and (has("<|return|>") or has("<|flush|>")):
        spared.add(ids["<|end|>"])
        kinds[ids["<|end|>"]] = int(Kind.USER_DEFINED)
    if has("</s>") and has("<|tool_response>"):
        spared.add(ids["</s>"])
        kinds[ids["</s>"]] = int(Kind.NORMAL)
    return spared
