"""Cutting text at the pieces that are matched before anything else.

llama.cpp's order (`tokenizer_st_partition`): the longest piece first, everywhere in the text;
then the next one in what is left. That is not the leftmost match: a long piece wins over a
shorter one that starts before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from superfluid_adapter_native.tokenizers.vocabulary import HIDDEN, Kind, Vocabulary

Fragment: TypeAlias = str | int
"""Ordinary text, or the id of a piece that was cut out."""

_CUT: Final = HIDDEN | Kind.USER_DEFINED
_HEAD_CHARACTERS: Final = 4
_SPACES: Final = " \t\n\v\f\r"
_LEFT_STRIPPED_PRE: Final = ("jina-v2-de", "jina-v2-es", "jina-v2-code")
_LEFT_STRIPPED_ARCHITECTURES: Final = ("nomic-bert-moe", "jina-bert-v3")
_RIGHT_STRIPPED_NAMES: Final = ("phi-3", "phi3")
_NOT_RIGHT_STRIPPED: Final = ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True, slots=True)
class Strips:
    """Pieces that swallow the spaces before (`left`) or after them (`right`)."""

    left: frozenset[int] = frozenset()
    right: frozenset[int] = frozenset()


def read_strips(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> Strips:
    """GGUF has no field for this; as in llama.cpp, names of model families decide."""
    name = str(metadata.get("general.name", "")).lower()
    pre = str(metadata.get("tokenizer.ggml.pre", ""))
    architecture = str(metadata.get("general.architecture", ""))
    ids = vocabulary.ids
    if any(one in pre for one in _LEFT_STRIPPED_PRE) or any(
        one in architecture for one in _LEFT_STRIPPED_ARCHITECTURES
    ):
        return Strips(left=frozenset(ids[text] for text in ("<mask>",) if text in ids))
    if any(one in name for one in _RIGHT_STRIPPED_NAMES):
        spared = {ids[text] for text in _NOT_RIGHT_STRIPPED if text in ids}
        return Strips(right=frozenset(set(vocabulary.of(_CUT)) - spared))
    if "modern-bert" in name:
        return Strips(left=frozenset(ids[text] for text in ("[MASK]",) if text in ids))
    return Strips()


class Partition:
    """Cuts texts of one vocabulary; immutable."""

    def __init__(self, vocabulary: Vocabulary, strips: Strips) -> None:
        self._pieces, self._strips = vocabulary.pieces, strips
        order = sorted(vocabulary.of(_CUT), key=lambda token: -len(self._pieces[token].encode()))
        visible = [token for token in order if not vocabulary.silent(token)]
        self._all, self._visible = self._by_head(order), self._by_head(visible)

    def _by_head(self, order: list[int]) -> dict[str, list[tuple[int, int]]]:
        """(place in the order, id) under a piece's first characters, so that a text without
        those is not searched for each of some thousand reserved pieces."""
        heads: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for place, token in enumerate(order):
            heads[self._pieces[token][:_HEAD_CHARACTERS]].append((place, token))
        return dict(heads)

    def cut(self, text: str, *, special: bool) -> list[Fragment]:
        """Fragments of `text` in order, none empty. Without `special`, only user-defined pieces
        are cut out."""
        heads = self._all if special else self._visible
        pieces = self._pieces
        present = sorted(
            entry
            for head, entries in heads.items()
            if head in text
            for entry in entries
            if pieces[entry[1]] in text
        )
        fragments: list[Fragment] = [text] if text else []
        for _, token in present:
            fragments = self._cut_one(fragments, token)
        return fragments

    def _cut_one(self, fragments: list[Fragment], token: int) -> list[Fragment]:
        found: list[Fragment] = []
        piece = self._pieces[token]
        for fragment in fragments:
            if isinstance(fragment, int) or piece not in fragment:
                found.append(fragment)
            else:
                self._interleave(found, fragment.split(piece), token)
        return found

    def _interleave(self, found: list[Fragment], parts: list[str], token: int) -> None:
        last = len(parts) - 1
        for place, raw in enumerate(parts):
            part = raw.rstrip(_SPACES) if place < last and token in self._strips.left else raw
            if place and token in self._strips.right:
                part = part.lstrip(_SPACES)
            if part:
                found.append(part)
            if place < last:
                found.append(token)
