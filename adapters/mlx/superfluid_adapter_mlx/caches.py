"""The shim over mlx-lm's caches: one way to read, copy, cut and rebuild them, whatever generation.

mlx-lm 0.31 splits a cache into `state` and `meta_state`; from 0.32 on `state` carries everything,
in another order for some classes and with whole buffers in place of the live rows. What a cache
holds in its attributes is the same in both, and in what lies between them, so that is read here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias

from superfluid_adapter_mlx.engine import cache_module, mx
from superfluid_compat.errors import Fault, Unsupported

Array: TypeAlias = Any
Cache: TypeAlias = Any
Generation: TypeAlias = Literal["meta", "plain"]
Trims: TypeAlias = Literal["always", "before-wrap", "never"]


def generation(module: Any = cache_module) -> Generation:
    """Whether caches keep a `meta_state`, by the class: an empty cache's instance may not tell."""
    return "meta" if hasattr(module.KVCache, "meta_state") else "plain"


@dataclass(frozen=True, slots=True)
class Form:
    """How one class of caches keeps its tokens.

    `numbers` are its plain attributes, `fixed` those of them that a model's layer sets for good.
    `arrays` are attributes that hold an array, a tuple of them or a list with gaps. `buffered`
    says that rows past the offset are room to grow.
    """

    name: str
    arrays: tuple[str, ...]
    numbers: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    trims: Trims = "never"
    buffered: bool = False
    batches: bool = False


_KV: Final = ("keys", "values")
_MEMBERS: Final = "CacheList"
FORMS: Final = {
    form.name: form
    for form in (
        Form("KVCache", _KV, ("offset",), trims="always", buffered=True, batches=True),
        Form(
            "QuantizedKVCache", _KV, ("offset", "group_size", "bits"), ("group_size", "bits"),
            trims="always", buffered=True,
        ),
        Form(
            "RotatingKVCache", _KV, ("offset", "keep", "max_size", "_idx"), ("keep", "max_size"),
            trims="before-wrap", buffered=True, batches=True,
        ),
        Form("ArraysCache", ("cache",), batches=True),
        Form("ChunkedKVCache", _KV, ("offset", "chunk_size", "start_position"), ("chunk_size",),
             buffered=True),
    )
}  # fmt: skip
"""`ConcatenateKVCache` is missing for a reason: it forgets what was cut from it."""

_BROKEN: Final[Mapping[Generation, Mapping[str, str]]] = {
    "meta": {"ChunkedKVCache": "loses tokens once its window slides, in mlx-lm of this generation"},
    "plain": {},
}
_NOTHING_LIVE: Final[Mapping[str, int]] = {"offset": 0, "_idx": 0, "start_position": 0}


def form_of(cache: Cache) -> Form | None:
    """The form of exactly this class; None for a list of caches. Raises `Unsupported`."""
    kind = type(cache)
    if kind is cache_module.CacheList:
        return None
    form = FORMS.get(kind.__name__)
    if form is None or kind is not getattr(cache_module, kind.__name__, None):
        raise Unsupported(f"caches of class {kind.__name__} cannot be copied, cut or moved")
    return form


def flat(caches: Sequence[Cache]) -> Iterator[Cache]:
    """Every cache that is no list of others."""
    for cache in caches:
        if type(cache) is cache_module.CacheList:
            yield from flat(cache.caches)
        else:
            yield cache


def broken(caches: Sequence[Cache], of: Generation | None = None) -> str | None:
    """The class at fault and why, when this mlx-lm computes wrongly with one of these caches."""
    reasons = _BROKEN[of or generation()]
    for cache in flat(caches):
        name = type(cache).__name__
        if name in reasons:
            return f"{name} {reasons[name]}"
    return None


# The live view.


@dataclass(frozen=True, slots=True)
class Part:
    """What one cache holds, without room to grow: plain numbers and arrays, or its members."""

    form: str
    numbers: Mapping[str, int] = field(default_factory=dict)
    arrays: tuple[Array | None, ...] = ()
    members: tuple[Part, ...] = ()

    def leaves(self) -> Iterator[Array]:
        """The arrays that are there, members' too."""
        yield from (array for array in self.arrays if array is not None)
        for member in self.members:
            yield from member.leaves()

    def mapped(self, change: Callable[[Array], Array]) -> Part:
        """The same with every array changed."""
        return replace(
            self,
            arrays=tuple(None if it is None else change(it) for it in self.arrays),
            members=tuple(member.mapped(change) for member in self.members),
        )


def live(cache: Cache) -> Part:
    """The live view of `cache`, lazily cut; no array is copied. Raises `Unsupported`."""
    form = form_of(cache)
    if form is None:
        return Part(_MEMBERS, members=tuple(live(member) for member in cache.caches))
    numbers = {name: int(getattr(cache, name)) for name in form.numbers}
    arrays = tuple(_arrays(cache, form))
    if form.buffered:
        rows = numbers["offset"] - numbers.get("start_position", 0)
        if rows == 0:
            return Part(form.name, {**numbers, **_empty(form)}, (None,) * len(arrays))
        # A ring that was filled holds as many rows as it does, in an order of its own.
        arrays = tuple(it if it is None or it.shape[2] <= rows else it[..., :rows, :]
                       for it in arrays)  # fmt: skip
    return Part(form.name, numbers, arrays)


def build(part: Part) -> Cache:
    """A cache that holds `part`; it shares the arrays."""
    kind = getattr(cache_module, part.form)
    cache = kind.__new__(kind)
    if part.form == _MEMBERS:
        cache.caches = tuple(build(member) for member in part.members)
        return cache
    form = FORMS[part.form]
    for name, value in part.numbers.items():
        setattr(cache, name, value)
    if form.arrays == ("cache",):
        cache.cache = list(part.arrays)
        cache.left_padding = cache.lengths = None
        return cache
    half = len(part.arrays) // 2
    for name, arrays in zip(_KV, (part.arrays[:half], part.arrays[half:]), strict=True):
        setattr(cache, name, _joined(arrays))
    return cache


def _arrays(cache: Cache, form: Form) -> Iterator[Array | None]:
    for name in form.arrays:
        held = getattr(cache, name)
        if isinstance(held, tuple | list):
            yield from held
        else:
            yield held


def _joined(arrays: tuple[Array | None, ...]) -> Any:
    if len(arrays) == 1:
        return arrays[0]
    return None if arrays[0] is None else arrays


def _empty(form: Form) -> dict[str, int]:
    return {name: _NOTHING_LIVE[name] for name in form.numbers if name in _NOTHING_LIVE}


# What the runtime asks of a sequence's caches.


def copied(caches: Sequence[Cache]) -> list[Cache]:
    """Caches of their own, without room to grow. Raises `Unsupported`."""
    parts = [live(cache).mapped(mx.contiguous) for cache in caches]
    mx.eval([leaf for part in parts for leaf in part.leaves()])
    return [build(part) for part in parts]


def held_arrays(caches: Sequence[Cache]) -> list[Array]:
    """Every buffer, room to grow included; of a class that is not known, what it calls state."""
    found: list[Array] = []
    for cache in flat(caches):
        form = FORMS.get(type(cache).__name__)
        held = list(_arrays(cache, form)) if form else arrays_in(vars(cache))
        found += [array for array in held if array is not None]
    return found


def arrays_in(held: Any) -> list[Array]:
    """Every array in nested dictionaries, lists and tuples."""
    if isinstance(held, mx.array):
        return [held]
    values = held.values() if isinstance(held, dict) else held
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
        return []
    return [array for each in values for array in arrays_in(each)]


def held_bytes(caches: Sequence[Cache]) -> int:
    """Bytes of the buffers, room to grow included."""
    return sum(array.nbytes for array in held_arrays(caches))


def live_bytes(caches: Sequence[Cache]) -> int:
    """Bytes of what is live. Raises `Unsupported`."""
    return sum(leaf.nbytes for cache in caches for leaf in live(cache).leaves())


def compactable(caches: Sequence[Cache], token_bytes: int, growth: int = 256) -> bool:
    """Whether a growth step's worth of tokens or more is room that could be given back."""
    return held_bytes(caches) - live_bytes(caches) >= growth * max(1, token_bytes)


def cuts(caches: Sequence[Cache]) -> Trims:
    """What can be cut from a sequence: anything, anything until a ring wraps, nothing."""
    found: set[Trims] = set()
    for cache in flat(caches):
        form = FORMS.get(type(cache).__name__)
        found.add(form.trims if form else "never")
    if "never" in found:
        return "never"
    return "before-wrap" if "before-wrap" in found else "always"


def cut(caches: Sequence[Cache], count: int) -> None:
    """Forget the last `count` tokens of a sequence.

    Raises `Unsupported` with nothing changed, by the class at fault; `Fault` when a cache that
    said it could did not, and the sequence is spoilt."""
    every = list(flat(caches))
    for cache in every:
        form = form_of(cache)
        if form is None or form.trims == "never":
            raise Unsupported(f"{type(cache).__name__} does not go back")
        if form.trims == "before-wrap" and not cache.is_trimmable():
            raise Unsupported(
                f"{type(cache).__name__} has wrapped: {cache.max_size} tokens are held of "
                f"{cache.offset}"
            )
    for cache in every:
        if cache.trim(count) != count:
            raise Fault(f"{type(cache).__name__} was cut by less than {count} tokens")
