"""`tokenizer.json`, read by the `tokenizers` library alone: no tokenizer code of a model's runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from superfluid_adapter_mlx.folder import read_json
from superfluid_compat.errors import ModelDamaged, OutOfBoundary, Unsupported
from superfluid_workerd.adapter import Tokenizer

_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE: Final = "▁"
"""How SentencePiece writes a space inside a piece (U+2581)."""


def _stand_ins() -> dict[int, int]:
    """GPT-2's printable stand-in of each byte, by code point: printable Latin-1 is itself, the
    rest follow from U+0100 in order (openai/gpt-2, encoder.py)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {0x100 + n: byte for n, byte in enumerate(hidden)}


_BYTE_OF: Final = _stand_ins()


class FolderTokenizer(Tokenizer):
    """The tokenizer of a model's folder. Immutable; its engines may be shared between threads.

    Two engines, since whether special tokens are read in a text is a setting of the engine."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        document = read_json(path, wanted=True)
        self._reading, self._plain = _engine(path), _engine(path)
        self._plain.encode_special_tokens = True
        added = self._plain.get_added_tokens_decoder()
        self._added = {token: each.content for token, each in added.items()}
        self._hidden = frozenset(token for token, each in added.items() if each.special)
        vocabulary = self._plain.get_vocab(with_added_tokens=True)
        self._size = 1 + max(vocabulary.values(), default=-1)
        kinds = set(_kinds(document.get("decoder")))
        self._byte_level = "ByteLevel" in kinds
        self._strips_space = bool(kinds & {"Strip", "Metaspace"})
        settings = read_json(folder / "tokenizer_config.json")
        self._bos = self._named(settings.get("bos_token"))
        self._eos = self._named(settings.get("eos_token"))
        stated = {
            *_ids(read_json(folder / "config.json")),
            *_ids(read_json(folder / "generation_config.json")),
        }
        self._stops = frozenset(
            token for token in {self._eos, *stated} if token is not None and token < self._size
        )

    def _named(self, named: Any) -> int | None:
        text = named.get("content") if isinstance(named, dict) else named
        return self._plain.token_to_id(text) if isinstance(text, str) else None

    @property
    def size(self) -> int:
        return self._size

    @property
    def bos(self) -> int | None:
        return self._bos

    @property
    def eos(self) -> int | None:
        return self._eos

    @property
    def stops(self) -> frozenset[int]:
        return self._stops

    def encode(self, text: str, *, add_special: bool = True, special: bool = False) -> list[int]:
        """See `Tokenizer.encode`. A lone surrogate in `text` counts as U+FFFD."""
        engine = self._reading if special else self._plain
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        try:
            return list(engine.encode(whole, add_special_tokens=add_special).ids)
        except BaseException as error:
            # A Rust panic derives from BaseException and has no importable class.
            if type(error).__name__ != "PanicException":
                raise
            raise Unsupported(f"the text cannot be tokenized: {error}") from error

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if not 0 <= token < self._size:
            raise OutOfBoundary(f"token {token}, the vocabulary ends at {self._size - 1}")
        if not special and (token in self._hidden or token in self._stops):
            return b""
        if token in self._added:
            return str(self._added[token]).encode()
        text: str | None = self._plain.id_to_token(token)
        return b"" if text is None else self._bytes_of(text)

    def _bytes_of(self, text: str) -> bytes:
        if self._byte_level:
            points = [ord(character) for character in text]
            if all(point in _BYTE_OF for point in points):
                return bytes(_BYTE_OF[point] for point in points)
            return text.encode()
        byte = _BYTE_PIECE.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace(_SPACE, " ").encode()

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> bytes:
        whole = b"".join(self.piece(token, special=special) for token in tokens)
        return whole.removeprefix(b" ") if self._strips_space else whole


def _engine(path: Path) -> Any:
    # Here, so that facts of a model need no library beyond the kit's.
    from tokenizers import Tokenizer as Engine

    try:
        return Engine.from_file(str(path))
    except Exception as error:
        raise ModelDamaged(f"{path}: {error}") from error


def _ids(config: Mapping[str, Any]) -> list[int]:
    """The ids at which generation ends, as a configuration states them."""
    stated = config.get("eos_token_id")
    ids = stated if isinstance(stated, list) else [stated]
    return [token for token in ids if type(token) is int and token >= 0]


def _kinds(decoder: Any) -> Iterator[str]:
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for part in decoder.get("decoders") or ():
            yield from _kinds(part)
