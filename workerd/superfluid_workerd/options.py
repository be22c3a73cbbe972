"""Options, declared once: parse, check, describe, resolve.

An adapter lists `Option` records; flags, config keys, environment names, JSON schema, completion
and documentation derive from them. Standard library only: daemon and workers both import this.
"""

from __future__ import annotations

import difflib
import enum
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from superfluid_compat.errors import BadOptionValue, UnknownOption

Value: TypeAlias = bool | int | float | str | tuple[int, ...]
"""What a checked option holds. Sizes are bytes, durations are seconds."""


class Kind(enum.StrEnum):
    """The shape of an option's value, as text and as JSON."""

    BOOLEAN = "boolean"
    INTEGER = "integer"
    NUMBER = "number"
    SIZE = "size"
    CHOICE = "choice"
    STRING = "string"
    PATH = "path"
    INDICES = "indices"


class Scope(enum.StrEnum):
    """Who consumes the value: the daemon, the runtime at start, or the model at load."""

    DAEMON = "daemon"
    RUNTIME = "runtime"
    MODEL = "model"


_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE: Final = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,19})?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,19}")
_NUMBER: Final = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)
_RANGE: Final = re.compile(r"\s*([0-9]{1,9})(?:\s*-\s*([0-9]{1,9}))?\s*")
_WORDS: Final = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
_LARGEST: Final = (1 << 63) - 1
_LARGEST_NUMBER: Final = sys.float_info.max
_MOST_INDICES: Final = 1 << 16
_LARGEST_INDEX: Final = 10**9
_LONGEST_SHOWN: Final = 80
_NAME: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class Option:
    """One declared option.

    `name` is kebab-case without the adapter's id. `minimum` and `maximum` are inclusive and bound
    integers, numbers and sizes. `keywords` are words accepted beside the range, such as `auto`.
    `default` is a value the option itself accepts, or None when leaving it out means something of
    its own. `unit` is for people: `bytes`, `tokens`, `threads`.
    """

    name: str
    kind: Kind
    help: str
    default: Value | None = None
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    unit: str = ""
    scope: Scope = Scope.MODEL

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"option name {self.name!r} is not kebab-case")
        if (self.kind is Kind.CHOICE) != bool(self.choices):
            raise ValueError(f"option {self.name}: choices go with kind choice, and only with it")
        if self.default is not None:
            self.check(self.default)

    def parse(self, text: str) -> Value:
        """The value that `text` (a flag, an environment variable) stands for.

        Raises `BadOptionValue`, its message naming the option, the text and what is accepted.
        """
        word = text.strip()
        if word.lower() in self.keywords:
            return word.lower()
        value = self._read(word)
        if value is None:
            raise self._refusal(text)
        return self.check(value)

    def _read(self, word: str) -> Value | None:
        match self.kind:
            case Kind.BOOLEAN:
                return _WORDS.get(word.lower())
            case Kind.INTEGER:
                return int(word) if _INTEGER.fullmatch(word) else None
            case Kind.NUMBER:
                return float(word) if _NUMBER.fullmatch(word) else None
            case Kind.SIZE:
                return parse_size(word)
            case Kind.INDICES:
                return parse_indices(word)
            case Kind.CHOICE:
                return word.lower()
            case Kind.STRING | Kind.PATH:
                return word

    def check(self, value: Any) -> Value:
        """`value` itself, checked; a config file's text is parsed, its lists become tuples.

        Raises `BadOptionValue` for a value of another shape or outside the range.
        """
        if isinstance(value, str) and value.lower() in self.keywords:
            return value.lower()
        if isinstance(value, str) and self.kind in (Kind.SIZE, Kind.INDICES):
            read = self._read(value)
            if read is None:
                raise self._refusal(value)
            return self.check(read)
        fitting: Any = tuple(value) if isinstance(value, list) else value
        if not self._fits(fitting):
            raise self._refusal(value)
        checked: Value = fitting
        return checked

    def _fits(self, value: Any) -> bool:
        match self.kind:
            case Kind.BOOLEAN:
                return isinstance(value, bool)
            case Kind.INTEGER | Kind.SIZE:
                return _is_int(value) and abs(value) <= _LARGEST and self._within(value)
            case Kind.NUMBER:
                real = _is_int(value) or isinstance(value, float)
                return real and abs(value) <= _LARGEST_NUMBER and self._within(value)
            case Kind.CHOICE:
                return value in self.choices
            case Kind.INDICES:
                return isinstance(value, tuple) and all(_is_index(i) for i in value)
            case Kind.STRING | Kind.PATH:
                return isinstance(value, str) and value != "" and "\0" not in value

    def _within(self, value: Any) -> bool:
        above = self.minimum is None or value >= self.minimum
        return above and (self.maximum is None or value <= self.maximum)

    def _refusal(self, found: object) -> BadOptionValue:
        return BadOptionValue(
            f"option {self.name} was given {_shown(found)}, wanted {self.accepts()}",
            fix=f"give --{self.name} {self.accepts()}",
            param=self.name,
        )

    def accepts(self) -> str:
        """What the option takes, in words: `an integer from 1 to 64, or auto`."""
        words = {
            Kind.BOOLEAN: "true or false",
            Kind.INTEGER: "an integer",
            Kind.NUMBER: "a number",
            Kind.SIZE: "a size such as 512M or 4G",
            Kind.CHOICE: "one of " + ", ".join(self.choices),
            Kind.STRING: "a text",
            Kind.PATH: "a path",
            Kind.INDICES: "indices such as 0-3,7",
        }
        text = words[self.kind]
        if self.minimum is not None and self.maximum is not None:
            text += f" from {_plain(self.minimum)} to {_plain(self.maximum)}"
        elif self.minimum is not None:
            text += f" of at least {_plain(self.minimum)}"
        elif self.maximum is not None:
            text += f" of at most {_plain(self.maximum)}"
        return text + (", or " + " or ".join(self.keywords) if self.keywords else "")

    def flag(self, adapter: str = "") -> str:
        """`--native-cache-bytes`, or without an adapter `--context`."""
        return f"--{adapter}-{self.name}" if adapter else f"--{self.name}"

    def variable(self, adapter: str = "") -> str:
        """`SUPERFLUID_NATIVE_CACHE_BYTES`, or without an adapter `SUPERFLUID_CONTEXT`."""
        return _variable(f"{adapter}-{self.name}" if adapter else self.name)

    def describe(self) -> dict[str, Any]:
        """The declaration as plain JSON, for `runtime options --json`."""
        return {
            "name": self.name,
            "type": self.kind.value,
            "help": self.help,
            "default": list(self.default) if isinstance(self.default, tuple) else self.default,
            "minimum": self.minimum,
            "maximum": self.maximum,
            "choices": list(self.choices),
            "keywords": list(self.keywords),
            "unit": self.unit,
            "scope": self.scope.value,
        }

    @classmethod
    def from_description(cls, data: Mapping[str, Any]) -> Option:
        """The inverse of `describe`: how the daemon learns an adapter's options from its worker."""
        default = data["default"]
        return cls(
            name=data["name"],
            kind=Kind(data["type"]),
            help=data["help"],
            default=tuple(default) if isinstance(default, list) else default,
            minimum=data["minimum"],
            maximum=data["maximum"],
            choices=tuple(data["choices"]),
            keywords=tuple(data["keywords"]),
            unit=data["unit"],
            scope=Scope(data["scope"]),
        )

    def schema(self) -> dict[str, Any]:
        """JSON schema of the value as a config file holds it."""
        shapes: dict[Kind, dict[str, Any]] = {
            Kind.BOOLEAN: {"type": "boolean"},
            Kind.INTEGER: {"type": "integer"},
            Kind.NUMBER: {"type": "number"},
            Kind.SIZE: {"type": ["integer", "string"]},
            Kind.CHOICE: {"enum": list(self.choices)},
            Kind.STRING: {"type": "string", "minLength": 1},
            Kind.PATH: {"type": "string", "minLength": 1},
            Kind.INDICES: {
                "type": ["array", "string"],
                "items": {"type": "integer", "minimum": 0},
            },
        }
        shape = shapes[self.kind]
        if self.minimum is not None:
            shape["minimum"] = self.minimum
        if self.maximum is not None:
            shape["maximum"] = self.maximum
        body = {"anyOf": [shape, {"enum": list(self.keywords)}]} if self.keywords else shape
        return {**body, "description": self.help}


@dataclass(frozen=True, slots=True)
class Resolved:
    """A value and where it came from: `default`, `flag`, `environment`, `config FILE`."""

    value: Value | None
    origin: str


def resolve(
    options: Iterable[Option], sources: Sequence[tuple[str, Mapping[str, object]]]
) -> dict[str, Resolved]:
    """Every option with its value and origin; the first source that names it wins.

    `sources` are (origin, values by option name), strongest first; text is parsed, other values
    are checked. Raises `UnknownOption` naming the nearest, and `BadOptionValue`; both advise what
    to mend where the value came from.
    """
    declared = {option.name: option for option in options}
    require_known(declared, sources)
    resolved = {}
    for name, option in declared.items():
        found = Resolved(option.default, "default")
        for origin, values in reversed(sources):
            if name in values:
                found = Resolved(_taken(option, values[name], origin), origin)
        resolved[name] = found
    return resolved


def _taken(option: Option, raw: object, origin: str) -> Value:
    try:
        return option.parse(raw) if isinstance(raw, str) else option.check(raw)
    except BadOptionValue as error:
        place = place_of(option.name, origin)
        if place is not None:
            error.fix = f"set {place} to {option.accepts()}"
        raise


def place_of(name: str, origin: str) -> str | None:
    """Where the value of option `name` stands that came from `origin`: the variable, or the file
    and its table; None for a flag and what else is given by a person's own hand."""
    if origin == "environment":
        return _variable(name)
    file = origin.removeprefix("config ")
    return f"{name} in {file}" if file != origin else None


def require_known(
    known: Iterable[str], sources: Sequence[tuple[str, Mapping[str, object]]], adapter: str = ""
) -> None:
    """Raise `UnknownOption` for the first name that is not among `known`, the options of
    `adapter`, or without one `serve`'s own."""
    names = set(known)
    for origin, values in sources:
        for name in values:
            if name not in names:
                raise unknown_option(name, names, origin, adapter)


def unknown_option(
    name: str, known: Iterable[str], origin: str, adapter: str = ""
) -> UnknownOption:
    """The refusal of `name`, with the nearest declared one, both as `origin` spells them."""
    near = nearest(name, sorted(known))
    see = f"runtime options {adapter}" if adapter else "serve --help"
    return UnknownOption(
        f"unknown option {_spelled(name, origin, adapter)} ({origin})",
        fix=f"did you mean {_spelled(near, origin, adapter)}?" if near else f"see superfluid {see}",
        param=f"{adapter}-{name}" if adapter else name,
    )


def _spelled(name: str, origin: str, adapter: str) -> str:
    whole = f"{adapter}-{name}" if adapter else name
    if origin == "flag":
        return f"--{whole}"
    return _variable(whole) if origin == "environment" else name


def _variable(name: str) -> str:
    return f"superfluid_{name}".replace("-", "_").upper()


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known word closest to `name`, or None when none is close."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)), None)


def parse_size(text: str) -> int | None:
    """Bytes from `1048576`, `256M`, `1.5 GiB` (binary units throughout); None when it is none."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    size = float(match[1]) * _UNITS[match[2].lower()]
    if match[2] == "" and "." not in match[1]:
        size = int(match[1])
    return int(size) if size <= _LARGEST else None


def parse_indices(text: str) -> tuple[int, ...] | None:
    """Distinct indices in order from `0-3,7`; None when it is no such list."""
    found: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            return None
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or len(found) + last - first >= _MOST_INDICES:
            return None
        found.extend(range(first, last + 1))
    return tuple(sorted(set(found)))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_index(value: Any) -> bool:
    return _is_int(value) and 0 <= value < _LARGEST_INDEX


def _shown(value: Any) -> str:
    if _is_int(value) and abs(value) > _LARGEST:
        return "an integer of more than 64 bits"
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."


def _plain(bound: float) -> str:
    return str(int(bound)) if float(bound).is_integer() else str(bound)


MOST_THREADS: Final = 256
"""That a runtime may compute with. A sandbox grants its worker twice as many."""

COMMON: Final = (
    Option("context", Kind.INTEGER, "longest stream, prompt and answer together; 0 asks for as "
           "much as the model was trained for and memory allows", 0, minimum=0,
           maximum=1 << 24, unit="tokens"),
    Option("lanes", Kind.INTEGER, "streams served at once", 4, minimum=1, maximum=256,
           unit="streams"),
    Option("threads", Kind.INTEGER, "threads the runtime computes with; 0 is one per core", 0,
           minimum=0, maximum=MOST_THREADS, unit="threads"),
    Option("memory-budget", Kind.SIZE, "most memory a worker may plan for", "auto",
           minimum=1 << 24, keywords=("auto",), unit="bytes"),
    Option("sandbox", Kind.CHOICE, "how far a worker is shut in; auto is as far as this machine "
           "can, any other is refused where it cannot be had", "auto",
           choices=("auto", "strict", "basic", "none")),
)  # fmt: skip
"""Options of `serve` that reach every adapter as plain values; an adapter declares only its own."""

SERVICE_CLASSES: Final = ("interactive", "completion", "agent", "background")
"""Classes of service, the most urgent first."""

WORKER: Final = (
    Option("max-seats", Kind.INTEGER, "most streams in one turn", 256, minimum=1, maximum=4096,
           unit="streams", scope=Scope.RUNTIME),
    Option("turn-linger-us", Kind.INTEGER, "how long a turn waits for streams that are arriving",
           0, minimum=0, maximum=10_000_000, unit="microseconds", scope=Scope.RUNTIME),
    Option("turn-tokens", Kind.INTEGER, "most tokens in one turn, all streams together", 512,
           minimum=1, maximum=1 << 20, unit="tokens", scope=Scope.RUNTIME),
    Option("prompt-chunk", Kind.INTEGER, "most tokens of one prompt in one turn", 512, minimum=1,
           maximum=1 << 20, unit="tokens", scope=Scope.RUNTIME),
    Option("turn-target-ms", Kind.INTEGER, "how long a turn may take for prompts beside streams "
           "that decode, or twice what it takes without them", 200, minimum=0, maximum=3_600_000,
           unit="milliseconds", scope=Scope.RUNTIME),
    Option("max-waiting", Kind.INTEGER, "streams that may wait for a lane", 256, minimum=0,
           maximum=1 << 20, unit="streams", scope=Scope.RUNTIME),
    Option("class-ageing-ms", Kind.INTEGER, "how much earlier a stream must have come to go before "
           "one of the next class up", 10_000, minimum=0, maximum=86_400_000,
           unit="milliseconds", scope=Scope.RUNTIME),
    *(
        Option(f"{name}-lanes", Kind.INTEGER, f"most lanes that {name} streams hold at once; 0 is "
               "no bound", 0, minimum=0, maximum=4096, unit="streams", scope=Scope.RUNTIME)
        for name in SERVICE_CLASSES
    ),
    Option("prefix-cache-bytes", Kind.SIZE, "most state of ended streams that is kept for prompts "
           "that begin alike, where the runtime has room for it or beside it", 1 << 30, minimum=0,
           unit="bytes", scope=Scope.RUNTIME),
    Option("parked-bytes", Kind.SIZE, "most state of preempted streams that is held outside of the "
           "runtime", 64 << 20, minimum=0, unit="bytes", scope=Scope.RUNTIME),
)  # fmt: skip
"""Settings of every worker, read from its environment: `SUPERFLUID_MAX_SEATS` and so on."""
