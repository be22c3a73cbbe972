"""Calls into the `tokenizers` library, its failures made ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from superfluid_compat.errors import Unsupported

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Engine


def encode_ids(engine: Engine, text: str, *, add_special: bool = False) -> list[int]:
    """Ids of `text`. Raises `Unsupported` where the
    library gives up on a text: its regular expressions bound their retries, which a single run of
    spaces of some ten megabytes exceeds."""
    try:
        ids: list[int] = engine.encode(text, add_special_tokens=add_special).ids
    except BaseException as error:
        # A Rust panic derives from BaseException and has no importable class.
        if type(error).__name__ != "PanicException":
            raise
        raise Unsupported(f"the text cannot be tokenized: {error}") from error
    return ids


__all__ = ["encode_ids"]
