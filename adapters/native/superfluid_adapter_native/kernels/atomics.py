"""Words shared between threads, and the C library's locks, for compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils as numba_cgutils
from numba.core import types
from numba.extending import intrinsic

cgutils: Any = numba_cgutils

Inline = Any
"""A function of 64-bit words that exists only inside compiled code."""

_WORD = ir.IntType(64)


def inline(names: str, returns: Any, write: Callable[..., Any]) -> Inline:
    """An intrinsic over integers called `names`; `write(builder, *arguments)` emits its body."""
    count = len(names.split())

    def typed(*_types: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            return write(builder, *values) or context.get_dummy_value()

        return returns(*([types.intp] * count)), generate

    scope: dict[str, Any] = {"typed": typed}
    text = f"lambda typingctx{''.join(f', {name}' for name in names.split())}: typed()"
    return intrinsic(eval(text, scope))  # noqa: S307 - numba reads the parameters' names


def _at(builder: Any, words: Any, index: Any) -> Any:
    pointer = builder.inttoptr(words, _WORD.as_pointer())
    return builder.gep(pointer, [index], source_etype=_WORD)


def _word(builder: Any, words: Any, index: Any) -> Any:
    return builder.load(_at(builder, words, index), typ=_WORD)


def _read(builder: Any, words: Any, index: Any) -> Any:
    return builder.load_atomic(_at(builder, words, index), "seq_cst", 8, typ=_WORD)


def _write(builder: Any, words: Any, index: Any, value: Any) -> None:
    builder.store_atomic(value, _at(builder, words, index), "seq_cst", 8)


def _add(builder: Any, words: Any, index: Any, value: Any) -> Any:
    return builder.atomic_rmw("add", _at(builder, words, index), value, "seq_cst")


def _swap(builder: Any, words: Any, index: Any, old: Any, new: Any) -> Any:
    found = builder.cmpxchg(_at(builder, words, index), old, new, "seq_cst", "seq_cst")
    return builder.zext(builder.extract_value(found, 1), _WORD)


def _call(builder: Any, kernel: Any, *arguments: Any) -> None:
    function = ir.FunctionType(ir.VoidType(), [_WORD] * len(arguments))
    builder.call(builder.inttoptr(kernel, function.as_pointer()), arguments)


word: Inline = inline("words index", types.intp, _word)
"""A word that nobody writes meanwhile: a kernel's parameter."""
read: Inline = inline("words index", types.intp, _read)
write: Inline = inline("words index value", types.void, _write)
add: Inline = inline("words index value", types.intp, _add)
"""Adds to a word; what it was."""
swap: Inline = inline("words index old new", types.intp, _swap)
"""Writes `new` where the word is `old`; 1 if it was."""
call: Inline = inline("kernel parameters task thread", types.void, _call)


def library(name: str, arguments: str) -> Inline:
    """A function of the C library over pointers, its result dropped."""

    def write(builder: Any, *values: Any) -> None:
        pointer = ir.IntType(8).as_pointer()
        function = ir.FunctionType(ir.IntType(32), [pointer] * len(values))
        declared = cgutils.get_or_insert_function(builder.module, function, name)
        builder.call(declared, [builder.inttoptr(value, pointer) for value in values])

    return inline(arguments, types.void, write)
