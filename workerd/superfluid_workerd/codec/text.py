"""A stream's bytes as text: whole characters only, and nothing from a stop string on."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field


class TextStream:
    """Turns the bytes of committed tokens into text that may go out.

    The text is `bytes.decode("utf-8", "replace")` of all bytes together, cut before the stop
    string that is completed first; of several completed by the same character, the longest
    counts. A character or a stop string that is only possible yet is held back until it is
    decided. What goes out depends on the bytes alone, not on how they were cut, so a replay of
    the same tokens yields the same text; its first `sent` characters are then left out. Time is
    linear in the text, whatever the stop strings (Aho and Corasick, 1975).
    """

    def __init__(self, stop: Sequence[str] = (), *, sent: int = 0) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._root = _automaton(stop)
        self._node = self._root
        self._held = ""
        self._skip = sent
        self._stopped_by: str | None = None

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, or None while none has."""
        return self._stopped_by

    def push(self, data: bytes) -> str:
        """What `data` makes certain. Empty once a stop string ended the text."""
        return self._advance(self._decoder.decode(data))

    def finish(self) -> str:
        """What was held back, at the end of the stream; may itself complete a stop string."""
        text = self._advance(self._decoder.decode(b"", final=True))
        rest, self._held, self._node = self._held, "", self._root
        return text + self._unsent(rest)

    def _advance(self, arrived: str) -> str:
        if self._stopped_by is not None:
            return ""
        if not self._root.next:
            return self._unsent(arrived)
        text = self._held + arrived
        for index, character in enumerate(arrived, len(self._held) + 1):
            self._node = self._node.after(character)
            if self._node.completes is not None:
                self._stopped_by, self._held = self._node.completes, ""
                return self._unsent(text[: index - len(self._stopped_by)])
        certain = len(text) - self._node.depth
        self._held = text[certain:]
        return self._unsent(text[:certain])

    def _unsent(self, text: str) -> str:
        skipped = min(self._skip, len(text))
        self._skip -= skipped
        return text[skipped:]


@dataclass(slots=True, eq=False)
class _Node:
    """A prefix of some stop string: the longest one that the text so far ends with.

    `completes` is the longest stop string that this prefix ends with.
    """

    depth: int
    next: dict[str, _Node] = field(default_factory=dict)
    fallback: _Node | None = None
    completes: str | None = None

    def after(self, character: str) -> _Node:
        node = self
        while character not in node.next:
            if node.fallback is None:
                return node
            node = node.fallback
        return node.next[character]


def _automaton(stop: Sequence[str]) -> _Node:
    root = _Node(0)
    for word in stop:
        node = root
        for character in word:
            node = node.next.setdefault(character, _Node(node.depth + 1))
        if node is not root:
            node.completes = word
    level = [root]
    while level:
        for node in level:
            for character, child in node.next.items():
                child.fallback = root if node.fallback is None else node.fallback.after(character)
                child.completes = child.completes or child.fallback.completes
        level = [child for node in level for child in node.next.values()]
    return root
