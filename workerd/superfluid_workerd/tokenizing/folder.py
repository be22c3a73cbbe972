"""`tokenizer.json` in a model's folder, read by the `tokenizers` library alone: no code of the
model's runs. The library is imported when a folder is read, since not every worker has it."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from superfluid_compat.errors import ModelDamaged, OutOfBoundary
from superfluid_workerd.adapter import Tokenizer
from superfluid_workerd.tokenizing.engine import encode_ids
from superfluid_workerd.tokenizing.pieces import SPACE, STOP_TEXTS, bytes_of, well_formed

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Engine

_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-F]{2})>")
_BYTES_MAX: Final = 256 << 20


class FolderTokenizer(Tokenizer):
    """The tokenizer of a model folder. Immutable; the engines are safe to share between threads.

    Two engines, since whether special tokens are read in a text is a setting of the engine.
    Raises `ModelDamaged` with the file at fault."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        content = read_bytes(path)
        if content is None:
            raise ModelDamaged(f"{folder} has no {path.name}")
        config = _settings(folder, "tokenizer_config.json", "special_tokens_map.json")
        self._reading = _engine(path, content)
        self._plain = _twin(self._reading) or _engine(path, content)
        self._plain.encode_special_tokens = True
        added = self._reading.get_added_tokens_decoder()
        self._hidden = frozenset(token for token, each in added.items() if each.special)
        self._added = {token: each.content for token, each in added.items()}
        self._size = 1 + max(self._reading.get_vocab(with_added_tokens=True).values(), default=-1)
        kinds = set(_decoder_kinds(_stated_decoder(self._reading)))
        self._byte_level = "ByteLevel" in kinds
        self._continuing = "WordPiece" in kinds
        self._strips_space = bool(kinds & {"Strip", "Metaspace"})
        self._bos = self._id_of(config.get("bos_token"))
        self._eos = self._id_of(config.get("eos_token"))
        self._stops = self._find_stops(folder)

    def _id_of(self, named: Any) -> int | None:
        text = named.get("content") if isinstance(named, dict) else named
        return self._plain.token_to_id(text) if isinstance(text, str) else None

    def _find_stops(self, folder: Path) -> frozenset[int]:
        by_text = {self._plain.token_to_id(text) for text in STOP_TEXTS}
        stated = _stated(_settings(folder, "generation_config.json"))
        for token in stated:
            if not self._knows(token):
                raise ModelDamaged(
                    f"{folder / 'generation_config.json'}: eos_token_id {token!r} is no token"
                )
        # What a model's own configuration says is often another vocabulary's.
        own = [it for it in _stated(_settings(folder, "config.json")) if self._knows(it)]
        found = {*(stated or own), self._eos, *(by_text & self._hidden)}
        return frozenset(token for token in found if token is not None)

    def _knows(self, token: Any) -> bool:
        return type(token) is int and 0 <= token < self._size

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


def regular(path: Path) -> int | None:
    """The size of a regular file, None where there is nothing. Raises `ModelDamaged` for anything
    else: a FIFO without a writer would be waited for without end."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError) as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(there.st_mode):
        raise ModelDamaged(f"{path} is no regular file")
    return there.st_size


def read_bytes(path: Path, most: int = _BYTES_MAX) -> bytes | None:
    """What is in a file of at most `most` bytes, None where there is none. Raises
    `ModelDamaged`."""
    size = regular(path)
    if size is None:
        return None
    if size > most:
        raise ModelDamaged(f"{path} is larger than {most >> 20} MiB")
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> ModelDamaged:
    """What to raise for a file that is there and gives `error`."""
    if isinstance(error, PermissionError):
        return ModelDamaged(
            f"{path} may not be read",
            fix="let the server's user read it; where it is a link that leads out of its folder, "
            "put the file itself there",
        )
    told = error.strerror if isinstance(error, OSError) else None
    return ModelDamaged(f"{path} cannot be read: {told or error}")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, None where there is no file. Raises `ModelDamaged`."""
    content = read_bytes(path)
    if content is None:
        return None
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelDamaged(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ModelDamaged(f"{path} holds {type(found).__name__}, wanted an object")
    return found


def _settings(folder: Path, *names: str) -> dict[str, Any]:
    """What the files that are there say; a later one overrides."""
    found: dict[str, Any] = {}
    for name in names:
        found |= read_json(folder / name) or {}
    return found


def _stated(config: Mapping[str, Any]) -> list[Any]:
    """The ids at which generation ends, as a configuration states them."""
    stated = config.get("eos_token_id")
    return stated if isinstance(stated, list) else [] if stated is None else [stated]


def _engine(path: Path, content: bytes) -> Engine:
    """The engine without what a file may carry over from training: texts cut or filled up to a
    length, merges left out at random."""
    from tokenizers import Tokenizer as Engine

    try:
        engine = Engine.from_buffer(content)
    except Exception as error:
        raise ModelDamaged(f"{path} cannot be read as a tokenizer: {error}") from error
    engine.no_truncation()
    engine.no_padding()
    if getattr(engine.model, "dropout", None) is not None:
        engine.model.dropout = None
    return engine


def _twin(engine: Engine) -> Engine | None:
    """A second engine over the same model, which takes a second to read where it is large; None
    where it does not come out alike."""
    from tokenizers import Tokenizer as Engine

    added = engine.get_added_tokens_decoder()
    made = Engine(engine.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (own := getattr(engine, part)) is not None:
            setattr(made, part, own)
    made.add_tokens([added[token] for token in sorted(added)])
    alike = repr(made.get_added_tokens_decoder()) == repr(added)
    return made if alike else None


def _stated_decoder(engine: Engine) -> Any:
    decoder = engine.decoder
    return None if decoder is None else json.loads(decoder.__getstate__())


def _decoder_kinds(decoder: Any) -> Iterator[str]:
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for part in decoder.get("decoders") or ():
            yield from _decoder_kinds(part)


__all__ = ["FolderTokenizer", "read_bytes", "read_json", "regular", "unreadable"]
