"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

import msgspec
from pydantic import Field

from superfluid.http.bodies import Body
from superfluid.http.openai.common import Texts, texts
from superfluid_workerd.link import validate
from superfluid_workerd.link.frames import Embedded, Text, Tokens

_FLOAT_BYTES: Final = 4
_AT_ONCE: Final = 1 << 16
"""Floats that are written before other requests get a turn."""


class EmbeddingBody(Body):
    """A text or several. Special tokens named in them stay text."""

    input: Texts
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None

    def inputs(self) -> list[Text | Tokens]:
        """Raises `InvalidField`."""
        found = texts(self.input, "input")
        validate.check_inputs(found)
        return found

    async def answer(self, found: Embedded, model: str) -> bytes:
        """OpenAI's list of embeddings as JSON."""
        encoder = msgspec.json.Encoder()
        rows = bytearray()
        unyielded = 0
        for row in self._rows(found):
            rows += b"," if rows else b""
            rows += encoder.encode(row)
            unyielded += found.width
            if unyielded >= _AT_ONCE:
                unyielded = 0
                await asyncio.sleep(0)
        tokens = sum(found.tokens)
        return encoder.encode(
            {
                "object": "list",
                "data": msgspec.Raw(b"[%b]" % bytes(rows)),
                "model": model,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )

    def _rows(self, found: Embedded) -> Iterator[dict[str, Any]]:
        size = _FLOAT_BYTES * found.width
        for index in range(len(found.tokens)):
            vector = found.vectors[index * size : (index + 1) * size]
            yield {"object": "embedding", "index": index, "embedding": self._written(vector)}

    def _written(self, vector: bytes) -> str | tuple[float, ...]:
        """As OpenAI does: numbers, or the bytes of little-endian float32."""
        if self.encoding_format == "base64":
            return base64.b64encode(vector).decode()
        return struct.unpack(f"<{len(vector) // _FLOAT_BYTES}f", vector)
