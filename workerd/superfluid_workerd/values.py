"""An adapter's options, read as what they were declared.

values = Values(request.options)
certainty = values.number("certainty")
layers = values.integer("max-layers", None)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Generic, TypeVar, overload

from superfluid_workerd.options import Value

V = TypeVar("V")
D = TypeVar("D")


class _Nothing:
    """Stands for a default that was not given."""


_NOTHING: Final = _Nothing()


class _Typed(Generic[V]):
    """Values of one type, by the option's name.

    Without a default the option must hold such a value: `TypeError` names it otherwise. With one,
    that is the answer where nothing was given, or a keyword in its place, such as `auto`.
    """

    def __init__(self, options: Mapping[str, Value | None], name: str, *types: type) -> None:
        self._options, self._name, self._types = options, name, types

    @overload
    def __call__(self, name: str) -> V: ...
    @overload
    def __call__(self, name: str, default: D) -> V | D: ...
    def __call__(self, name: str, default: object = _NOTHING) -> object:
        value = self._options.get(name)
        if isinstance(value, self._types) and isinstance(value, bool) == (bool in self._types):
            return value
        absent = value is None or isinstance(value, str)
        if absent and not isinstance(default, _Nothing):
            return default
        raise TypeError(f"option {name} holds {value!r}, wanted {self._name}")


class Values:
    """`options` by type: `integer` (sizes too), `number`, `text` (choices and paths too), `flag`
    and `indices`, each called with a name and, for what may be left out, a default."""

    def __init__(self, options: Mapping[str, Value | None]) -> None:
        self.integer: Final[_Typed[int]] = _Typed(options, "an integer", int)
        self.number: Final[_Typed[float]] = _Typed(options, "a number", int, float)
        self.text: Final[_Typed[str]] = _Typed(options, "a text", str)
        self.flag: Final[_Typed[bool]] = _Typed(options, "true or false", bool)
        self.indices: Final[_Typed[tuple[int, ...]]] = _Typed(options, "indices", tuple)


__all__ = ["Values"]
