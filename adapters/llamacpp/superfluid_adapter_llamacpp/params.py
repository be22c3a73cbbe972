"""Parameters by value: the library's own default bytes, patched at offsets that are known."""

from __future__ import annotations

import ctypes as ct
from collections.abc import Mapping
from typing import Any

from superfluid_adapter_llamacpp.contracts import Layout
from superfluid_adapter_llamacpp.symbols import Params


class NoSuchField(Exception):
    """The layout lacks a member; the message is its name."""


def default_bytes(getter: Any) -> bytes:
    """What the library's getter of defaults gives; past the real struct the bytes mean nothing."""
    return bytes(getter())


def patched(getter: Any, layout: Layout, values: Mapping[str, float]) -> Params:
    """The library's defaults with `values` put in, by member name. Raises `NoSuchField`."""
    raw = bytearray(default_bytes(getter))
    for name, value in values.items():
        if name not in layout.fields:
            raise NoSuchField(name)
        layout.fields[name].write(raw, value)
    return Params.from_buffer_copy(raw)


def address(callback: Any) -> int:
    """A ctypes callback or array as the number that a pointer member holds."""
    return ct.cast(callback, ct.c_void_p).value or 0
