"""The kernels' door: products with weights, and what a transformer does between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from superfluid_adapter_native.kernels import attention, elementwise, layouts, products, rows
from superfluid_adapter_native.kernels.cache import KernelCache
from superfluid_adapter_native.kernels.driver import Driver
from superfluid_adapter_native.kernels.features import Features, host
from superfluid_adapter_native.kernels.tape import TAPE_ROWS, Tape
from superfluid_adapter_native.kernels.weights import Activations, Weight, address
from superfluid_adapter_native.quants.types import TensorType

Floats: TypeAlias = NDArray[np.float32]
CacheType: TypeAlias = Literal["f32", "f16", "q8_0"]
_Maker: TypeAlias = Callable[[str, Features], products.Kernel]
Parts: TypeAlias = tuple[NDArray[Any], ...]

_TASK_BYTES: Final = 256 << 10
_FEW_TASKS_PER_THREAD: Final = 4
_LARGE_TASK_BYTES: Final = 256 << 10
_MANY: Final = 16
_TASKS_PER_THREAD: Final = 8
_TILE_BYTES: Final = 512 << 10
_PART: Final = 1024
_ALONE_BYTES: Final = 32 << 10
_ALONE_FLOATS: Final = 16 << 10
_ALONE_MACS: Final = 64 << 10
_SPAN: Final = 4 << 10
_CACHE_DTYPES: Final = {"f32": "float32", "f16": "float16", "q8_0": "int8"}
_CACHE_TYPES: Final = {"float32": "F32", "float16": "F16", "int8": layouts.APART}


class Kernels:
    """Everything compiled for one process; called by one thread at a time.

    `exact` multiplies with floats as they are; otherwise x is rounded to int8 per thirty-two where
    a weight is quantised. Either way a row of a result has the same bits whatever rows stand beside
    it and however many threads there are. `cache` is a folder that kernels are read from, and
    written to if `writable`; without one everything compiles here. `close` ends its threads.
    """

    def __init__(
        self,
        *,
        threads: int,
        exact: bool,
        cache: Path | None,
        writable: bool = False,
        features: Features | None = None,
    ) -> None:
        self.exact = exact
        self.features = host() if features is None else features
        self.store = KernelCache(cache, writable=writable)
        self._driver = Driver(self.store, threads)
        self._kernels: dict[str, int] = {}
        self._by_type: dict[tuple[_Maker, str], int] = {}
        self._scratch = np.empty(0, np.float32)
        self._buffers: list[NDArray[np.uint8]] = []

    def close(self) -> None:
        """End the helper threads; what is called afterwards runs on its caller."""
        self._driver.close()

    def prepare(
        self,
        kinds: Iterable[TensorType],
        caches: Iterable[CacheType],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Loads, or compiles, everything for a model of these types and key-value caches.

        Without this each kernel comes when it is first wanted. `progress(done, total)` in kernels.
        """
        wanted: dict[str, Callable[[], products.Kernel]] = {
            "rms_norm": elementwise.rms_norm,
            "add": elementwise.add,
            "softcap": elementwise.softcap,
            **{f"gated-{name}": partial(elementwise.gated, name) for name in elementwise.GATES},
            **{f"rope-{name}": partial(elementwise.rope, name) for name in elementwise.PAIRINGS},
        }
        if not self.exact:
            wanted["quantise"] = products.quantiser
        typed: list[tuple[_Maker, str]] = [
            (attention.attention, _CACHE_TYPES[_CACHE_DTYPES[cache]]) for cache in caches
        ]
        for name in {"F32", *(kind.name for kind in kinds)}:
            typed += [(self._product(name, n), name) for n in (1, _MANY)]
            typed.append((products.reader, name))
        for make, name in typed:
            wanted[self._key(make, name)] = partial(make, name, self.features)
        for done, (name, build) in enumerate(sorted(wanted.items())):
            progress(done, len(wanted))
            self._kernel(name, build)
        progress(len(wanted), len(wanted))

    @contextmanager
    def recording(self, tape: Tape) -> Iterator[None]:
        """What is called meanwhile is done, and is a segment of `tape`. Rows of x are `TAPE_ROWS`
        at the most. Results that come without an `out` lie in buffers that all tapes share: those
        of one tape stay until another is recorded or replayed."""
        self._driver.tape = tape
        try:
            yield
        finally:
            self._driver.tape = None
        tape.end_segment()

    def replay(self, tape: Tape, segment: int, matrices: Mapping[str, Weight]) -> None:
        """A segment's calls once more, with what their buffers hold now, and with `matrices`."""
        if segment == 0:
            tape.bind(matrices)
        self._driver.replay(tape, segment)

    def new(self, shape: tuple[int, ...], dtype: type[np.generic] = np.float32) -> NDArray[Any]:
        """An array: of its own, or on a tape's next buffer, which has room for `TAPE_ROWS` rows."""
        tape = self._driver.tape
        if tape is None:
            return np.empty(shape, dtype)
        size = math.prod(shape) * np.dtype(dtype).itemsize
        wanted = size // max(1, shape[0]) * TAPE_ROWS
        if tape.taken == len(self._buffers):
            self._buffers.append(np.empty(0, np.uint8))
        if self._buffers[tape.taken].size < wanted:
            self._buffers[tape.taken] = np.empty(wanted, np.uint8)
        buffer = self._buffers[tape.taken]
        tape.taken += 1
        tape.keep(buffer)
        return buffer[:size].view(dtype).reshape(shape)

    def _at(self, array: NDArray[Any]) -> int:
        """Its address; a tape that is being written keeps it alive."""
        if self._driver.tape is not None:
            self._driver.tape.keep(array)
        return address(array)

    def weight(
        self, kind: TensorType, raw: NDArray[np.uint8], shape: tuple[int, int], *, resident: bool
    ) -> Weight:
        """A matrix of `kind` over its bytes, which are neither copied nor re-arranged.

        Raises ValueError if `raw` is not exactly as long as `shape` says.
        """
        rows, columns = shape
        row_bytes = kind.row_bytes(columns)
        if raw.nbytes != rows * row_bytes or not raw.flags.c_contiguous:
            raise ValueError(f"{raw.nbytes} bytes of {kind.name}, {rows * row_bytes} wanted")
        return Weight(kind, shape, raw, address(raw), row_bytes)

    def quantise(self, x: Floats) -> Activations:
        """Rows of x (n, columns) ready for `linear`, to be shared by several weights."""
        x = _rows(x)
        n, columns = x.shape
        if self.exact or columns % layouts.GROUP:
            return Activations(x)
        codes = self.new((n, columns), np.int8)
        scales = self.new((n, columns // layouts.GROUP))
        fours = self.new((n, columns // 4))
        shares = self.new((n, columns // 16))
        given = Activations(x, codes, scales, fours, shares)
        words = [self._at(x), x.strides[0], scales.shape[1], *given.addresses()]
        kernel = self._kernel("quantise", products.quantiser)
        self._driver.run(kernel, words, n, alone=n < 8)
        return given

    def linear(self, x: Floats | Activations, weight: Weight, out: Floats | None = None) -> Floats:
        """x (n, columns) times the transposed weight: (n, rows).

        Rows of `out` are contiguous and may lie apart, as in some columns of a wider table."""
        given = x if isinstance(x, Activations) else Activations(_rows(x))
        rows, columns = weight.shape
        n = given.x.shape[0]
        if given.x.shape[1] != columns:
            raise ValueError(f"x has {given.x.shape[1]} columns, {columns} wanted")
        out = self._target(out, (n, rows), apart=True)
        make = self._product(weight.type.name, n)
        per_task = self._rows_per_task(weight, n)
        words = [weight.address, weight.row_bytes, rows, per_task]
        tail = [n, self._at(out), out.strides[0]]
        if make is products.int8_product:
            given = given if given.codes is not None else self.quantise(given.x)
            words += [columns // weight.type.elements, *tail, *given.addresses(), columns]
        else:
            words += [columns, *tail, self._at(given.x), given.x.strides[0]]
            if make is products.tiled_product:
                words += self._tile(columns)
        kernel = self._typed(make, weight.type.name)
        tasks = -(-rows // per_task)
        if self._driver.tape is not None:
            self._driver.tape.product()
        self._driver.run(kernel, words, tasks, alone=n * weight.bytes < _ALONE_BYTES)
        return out

    def _rows_per_task(self, weight: Weight, n: int) -> int:
        """Few rows of x read weights at memory's speed, which wants long runs of them in each
        thread and as many in one as in another. Many rows pass by once for each task, which stays
        in the second cache meanwhile."""
        if n < _MANY:
            whole = weight.bytes // (_TASK_BYTES * self._driver.threads)
            tasks = self._driver.threads * max(1, min(whole, _FEW_TASKS_PER_THREAD))
            return -(-weight.shape[0] // tasks)
        each = weight.shape[0] // (_TASKS_PER_THREAD * self._driver.threads)
        return max(1, min(each, _LARGE_TASK_BYTES // weight.row_bytes))

    def _tile(self, columns: int) -> list[int]:
        """Rows of a tile, columns of a part, each thread's room for sums and decoded weights."""
        height, width = rows.SQUARE
        per_tile = max(height, _TILE_BYTES // (4 * columns) // height * height)
        cells = (per_tile // height + height) * height * width * self.features.lanes
        return [per_tile, _PART, *self._room(cells + per_tile * columns)]

    def _room(self, floats: int) -> list[int]:
        """The address of `floats` floats for each thread, and their size in bytes."""
        if self._scratch.size < floats * self._driver.threads:
            self._scratch = np.empty(2 * floats * self._driver.threads, np.float32)
        return [self._at(self._scratch), 4 * floats]

    def gather(self, weight: Weight, ids: Sequence[int] | NDArray[np.int64]) -> Floats:
        """Rows `ids` of a weight as floats: (n, columns). Raises IndexError outside its rows."""
        wanted = np.ascontiguousarray(ids, np.int64)
        rows, columns = weight.shape
        if wanted.size and not (wanted.min() >= 0 and wanted.max() < rows):
            raise IndexError(f"row {wanted.max()} of {rows}")
        out = self.new((wanted.size, columns))
        words = [weight.address, weight.row_bytes, columns]
        words += [self._at(wanted), self._at(out), out.strides[0]]
        kernel = self._typed(products.reader, weight.type.name)
        self._driver.run(kernel, words, wanted.size, alone=wanted.size < 16)
        return out

    def rms_norm(self, x: Floats, w: Floats, eps: float, out: Floats | None = None) -> Floats:
        """Rows x (..., columns) / sqrt(mean(x²) + eps) * w; `out` may be x."""
        x, w = _rows(x), _rows(w)
        out = self._target(out, x.shape)
        columns = x.shape[-1]
        if w.shape != (columns,):
            raise ValueError(f"w is {w.shape} for rows of {columns}")
        words = [self._at(x), self._at(w), columns, elementwise.bits(eps), self._at(out)]
        self._run("rms_norm", elementwise.rms_norm, words, x.size // columns, x.size)
        return out

    def add(self, x: Floats, y: Floats) -> None:
        """x += y in place, for contiguous x (n, columns) and y the same or (columns,)."""
        x, y = self._target(x, x.shape), _rows(y)
        if y.shape not in (x.shape, x.shape[1:]):
            raise ValueError(f"y is {y.shape} for x {x.shape}")
        columns = x.shape[-1]
        stride = 4 * columns if y.shape == x.shape else 0
        words = [self._at(x), self._at(y), stride, columns]
        self._run("add", elementwise.add, words, x.size // columns, x.size)

    def silu_mul(self, gate: Floats, up: Floats, out: Floats | None = None) -> Floats:
        """silu(gate) * up; `out` may be either of them."""
        return self._gated("silu", gate, up, out)

    def gelu_tanh_mul(self, gate: Floats, up: Floats, out: Floats | None = None) -> Floats:
        """gelu(gate) * up by the tanh formula; `out` may be either of them."""
        return self._gated("gelu_tanh", gate, up, out)

    def _gated(self, name: str, gate: Floats, up: Floats, out: Floats | None) -> Floats:
        gate, up = _rows(gate), _rows(up)
        if up.shape != gate.shape:
            raise ValueError(f"gate is {gate.shape}, up is {up.shape}")
        out = self._target(out, gate.shape)
        words = [self._at(gate), self._at(up), self._at(out), gate.size, _SPAN]
        make = partial(elementwise.gated, name)
        self._run(f"gated-{name}", make, words, -(-gate.size // _SPAN), gate.size)
        return out

    def softcap(self, x: Floats, cap: float) -> None:
        """x = cap * tanh(x / cap), in place over a contiguous array."""
        x = self._target(x, x.shape)
        words = [self._at(x), x.size, _SPAN, elementwise.bits(cap)]
        self._run("softcap", elementwise.softcap, words, -(-x.size // _SPAN), x.size)

    def rope(
        self,
        q: Floats,
        positions: NDArray[np.integer],
        cosines: Floats,
        sines: Floats,
        *,
        pairs: bool,
    ) -> None:
        """Turns q (n, heads, size) in place by the tables' (positions, half) rows `positions`.

        The first 2 * half floats of a head are turned: float 2i with float 2i + 1 (`pairs`), or
        float i with float half + i. Raises ValueError where shapes differ, IndexError past a table.
        """
        n, heads, size = q.shape
        cosines, sines, at = _rows(cosines), _rows(sines), np.ascontiguousarray(positions, np.int64)
        half = cosines.shape[1]
        if cosines.shape != sines.shape or 2 * half > size or at.shape != (n,):
            raise ValueError(f"tables {cosines.shape}, {sines.shape} and {at.shape} for {q.shape}")
        if n and not 0 <= at.min() <= at.max() < len(cosines):
            raise IndexError(f"position {at.max()} in a table of {len(cosines)}")
        q = self._target(q, q.shape)
        words = [self._at(q), heads, size, half, self._at(cosines), self._at(sines), self._at(at)]
        pairing = "pairs" if pairs else "halves"
        self._run(f"rope-{pairing}", partial(elementwise.rope, pairing), words, n, q.size)

    def attention(
        self,
        q: Floats,
        keys: Parts,
        values: Parts,
        *,
        start: int,
        scale: float,
        window: int | None = None,
        cap: float | None = None,
        out: Floats | None = None,
    ) -> Floats:
        """Causal attention of q (n, heads, size), its rows at `start` and on, to (n, heads, any).

        `keys` and `values` are (positions, kv_heads, size) of float32 or float16, or of int8 with
        scales (positions, kv_heads, size / 32) of float32; q's own positions are among them. Row i
        sees the last `window` positions up to its own. Query heads in a row share one key head.
        """
        n, heads, size = q.shape
        kv_heads = _key_heads(q, keys, values, start + n)
        q, out = _rows(q), self._target(out, (n, heads, values[0].shape[2]))
        span = start + n if not window else min(start + n, window)
        tile = attention.POSITIONS * max(size, out.shape[2])
        each = tile + heads // kv_heads * span
        words = [self._at(q), self._at(out), heads, kv_heads, size, out.shape[2], start, span]
        words += [elementwise.bits(scale), elementwise.bits(cap or 0.0)]
        words += [self._at(keys[0]), keys[0].strides[0], keys[0].strides[1]]
        words += [self._at(parts[1]) if len(parts) > 1 else 0 for parts in (keys, values)]
        words += [self._at(values[0]), values[0].strides[0], values[0].strides[1]]
        words += [*self._room(each), 4 * tile]
        kernel = self._typed(attention.attention, _CACHE_TYPES[keys[0].dtype.name])
        alone = n * heads * span * size < _ALONE_MACS
        self._driver.run(kernel, words, n * kv_heads, alone=alone)
        return out

    def _target(self, out: Floats | None, shape: tuple[int, ...], *, apart: bool = False) -> Floats:
        if out is None:
            return self.new(shape)
        laid = out.strides[-1] == 4 if apart else out.flags.c_contiguous
        if out.shape != shape or out.dtype != np.float32 or not laid:
            raise ValueError(f"out is {out.dtype} {out.shape}, contiguous float32 {shape} wanted")
        return out

    def _run(
        self,
        name: str,
        make: Callable[[], products.Kernel],
        words: Sequence[int],
        tasks: int,
        floats: int,
    ) -> None:
        kernel = self._kernel(name, make)
        self._driver.run(kernel, words, tasks, alone=floats < _ALONE_FLOATS)

    def _product(self, kind: str, n: int = 1) -> _Maker:
        if not self.exact and kind in layouts.UNPACK:
            return products.int8_product
        return products.float_product if n < rows.SQUARE[1] else products.tiled_product

    def _key(self, make: _Maker, kind: str) -> str:
        return f"{make.__name__}-{kind}-{self.features.name}"

    def _typed(self, make: _Maker, kind: str) -> int:
        address = self._by_type.get((make, kind))
        if address is None:
            address = self._kernel(self._key(make, kind), partial(make, kind, self.features))
            self._by_type[make, kind] = address
        return address

    def _kernel(self, name: str, make: Callable[[], products.Kernel]) -> int:
        address = self._kernels.get(name)
        if address is None:
            address = self._kernels[name] = self._driver.kernel(name, make())
        return address


def _rows(x: Floats) -> Floats:
    return np.ascontiguousarray(x, np.float32)


def _key_heads(q: Floats, keys: Parts, values: Parts, wanted: int) -> int:
    """The key heads of a cache, once its parts are known to fit each other, q and `wanted`."""
    positions, heads, size = keys[0].shape
    if size != q.shape[2] or q.shape[1] % heads or wanted > positions:
        raise ValueError(f"keys {keys[0].shape} for q {q.shape}, {wanted} positions wanted")
    kind = keys[0].dtype
    for data, *scales in (keys, values):
        table = (positions, heads, data.shape[2] // layouts.GROUP)
        fits = data.shape[:2] == (positions, heads) and data.dtype == kind
        fits = fits and len(scales) == (kind == np.int8)
        fits = fits and all(part.shape == table and part.dtype == np.float32 for part in scales)
        if not fits or not all(part.flags.c_contiguous for part in (data, *scales)):
            raise ValueError(f"a cache of {data.dtype} {data.shape} and {len(scales)} scale tables")
    return int(heads)
