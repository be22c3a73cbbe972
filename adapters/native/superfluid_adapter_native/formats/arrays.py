"""Arrays of a GGUF header that build an element only when it is asked for."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence
from typing import overload

from superfluid_compat.errors import ModelDamaged


class StringArray(Sequence[str]):
    """Strings in GGUF's layout (an 8-byte length, then UTF-8), sliced out on demand.

    `raw` holds them back to back and `starts` where each one's length field lies, followed by the
    end. `raw_at` gives a string's bytes; indexing raises `ModelDamaged` where they are not UTF-8.
    """

    __slots__ = ("_raw", "_starts", "_where")

    def __init__(self, raw: bytes, starts: array[int], where: str) -> None:
        self._raw = raw
        self._starts = starts
        self._where = where

    def __len__(self) -> int:
        return len(self._starts) - 1

    def raw_at(self, index: int) -> bytes:
        """The bytes of one string, 0 <= index < len."""
        return self._raw[self._starts[index] + 8 : self._starts[index + 1]]

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        places = range(len(self))[index]
        if isinstance(places, range):
            return [self._text(place) for place in places]
        return self._text(places)

    def __iter__(self) -> Iterator[str]:
        raw = self._raw
        # Tokenizers read whole vocabularies; by index that takes five times as long.
        for place, (start, end) in enumerate(itertools.pairwise(self._starts)):
            try:
                yield raw[start + 8 : end].decode()
            except UnicodeDecodeError:
                yield self._text(place)

    def _text(self, index: int) -> str:
        try:
            return self.raw_at(index).decode()
        except UnicodeDecodeError as error:
            raise ModelDamaged(f"{self._where}[{index}]: is not UTF-8 ({error.reason})") from error
