"""`tokenizer.json` beside safetensors, read by the `tokenizers` library."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer as Engine

from superfluid_adapter_native.tokenizers.base import SPACE, well_formed
from superfluid_adapter_native.tokenizers.bytepair import bytes_of
from superfluid_adapter_native.tokenizers.engine import encode_ids
from superfluid_adapter_native.tokenizers.vocabulary import STOP_TEXTS
from superfluid_compat.errors import ModelDamaged, OutOfBoundary
from superfluid_workerd.adapter import Tokenizer

_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-F]{2})>")
_BYTES_MAX: Final = 256 << 20


class HuggingFaceTokenizer(Tokenizer):
    """The tokenizer of a model folder. Immutable; the engines are safe to share between threads.

    Two engines, since whether special tokens are read in a text is a setting of the engine."""

    def __init__(self, folder: Path) -> None:
        document = _json(folder / "tokenizer.json", wanted=True)
        config = _json(folder / "tokenizer_config.json") | _json(folder / "special_tokens_map.json")
        serial = json.dumps(document)
        self._reading, self._plain = _engine(serial), _engine(serial)
        self._plain.encode_special_tokens = True
        self._hidden = _hidden(document)
        self._size = 1 + max(self._plain.get_vocab(with_added_tokens=True).values(), default=-1)
        self._added = {
            token: added.content for token, added in self._plain.get_added_tokens_decoder().items()
        }
        kinds = set(_decoder_kinds(document.get("decoder")))
        self._byte_level = "ByteLevel" in kinds
        self._continuing = "WordPiece" in kinds
        self._strips_space = bool(kinds & {"Strip", "Metaspace"})
        self._bos = self._id_of(config.get("bos_token"))
        self._eos = self._id_of(config.get("eos_token"))
        self._stops = self._find_stops(_json(folder / "generation_config.json"))

    def _id_of(self, named: Any) -> int | None:
        text = named.get("content") if isinstance(named, dict) else named
        return self._plain.token_to_id(text) if isinstance(text, str) else None

    def _find_stops(self, generation: dict[str, Any]) -> frozenset[int]:
        stated = generation.get("eos_token_id")
        ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
        for token in ids:
            if not isinstance(token, int) or not 0 <= token < self._size:
                raise ModelDamaged(f"generation_config.json: eos_token_id {token!r} is no token")
        by_text = {self._plain.token_to_id(text) for text in STOP_TEXTS}
        found = {*ids, self._eos, *(by_text & self._hidden)}
        return frozenset(token for token in found if token is not None)

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
        return encode_ids(engine, well_formed(text), add_special=add_special)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if not 0 <= token < self._size:
            raise OutOfBoundary(f"token {token}, the vocabulary ends at {self._size - 1}")
        if token in self._hidden and not special:
            return b""
        if token in self._added:
            return self._added[token].encode()
        text = self._plain.id_to_token(token)
        return b"" if text is None else self._bytes_of(text)

    def _bytes_of(self, text: str) -> bytes:
        if self._byte_level:
            return bytes_of(text)
        if self._continuing:
            return text[2:].encode() if text.startswith("##") else f" {text}".encode()
        byte = _BYTE_PIECE.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace(SPACE, " ").encode()

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> bytes:
        whole = b"".join(self.piece(token, special=special) for token in tokens)
        strips = self._strips_space or self._continuing
        return whole.removeprefix(b" ") if strips else whole


def _engine(serial: str) -> Engine:
    try:
        return Engine.from_str(serial)
    except Exception as error:
        raise ModelDamaged(f"tokenizer.json: {error}") from error


def _json(path: Path, *, wanted: bool = False) -> dict[str, Any]:
    """The object in a JSON file; an absent one is empty unless `wanted`."""
    try:
        if path.stat().st_size > _BYTES_MAX:
            raise ModelDamaged(f"{path.name} is larger than {_BYTES_MAX >> 20} MiB")
        found = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        if wanted:
            raise ModelDamaged(f"the model folder has no {path.name}") from error
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelDamaged(f"{path.name} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ModelDamaged(f"{path.name} holds {type(found).__name__}, wanted an object")
    return found


def _hidden(document: dict[str, Any]) -> frozenset[int]:
    """Ids of the special ones among the added tokens."""
    added = document.get("added_tokens") or []
    return frozenset(
        entry["id"]
        for entry in added
        if isinstance(entry, dict) and entry.get("special") and isinstance(entry.get("id"), int)
    )


def _decoder_kinds(decoder: Any) -> Iterator[str]:
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for part in decoder.get("decoders") or ():
            yield from _decoder_kinds(part)
