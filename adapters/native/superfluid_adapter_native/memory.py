"""Every map and every buffer of a model's weights, and how much memory they may hold."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from superfluid_adapter_native.arena import Arena, Bytes, whole_pages
from superfluid_adapter_native.formats.source import ModelSource, Tensor
from superfluid_adapter_native.slots import Slots
from superfluid_adapter_native.units import Unit, unit_of
from superfluid_adapter_native.weight_files import WeightFiles
from superfluid_compat.errors import DoesNotFit, ModelDamaged

Probe = Callable[[], int]
"""The process's resident bytes now."""

DEFAULT_CACHE_BYTES: Final = 256 << 20
RETURN_BYTES: Final = 1 << 20
"""Maps of this size and more are handed back to the system explicitly when they close."""
_POPULATE_READ: Final = 22
"""Linux's MADV_POPULATE_READ (5.14), which `mmap` has no name for."""
_LINUX: Final = sys.platform == "linux"
_TOO_MANY: Final = (errno.EMFILE, errno.ENFILE)
"""What says that a map, which holds a descriptor of its own, was one too many."""


def default_probe() -> int:
    """Resident bytes of this process by psutil, else by /proc, else the peak by getrusage."""
    for probe in (_psutil_rss, _proc_rss):
        found = probe()
        if found is not None:
            return found
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _psutil_rss() -> int | None:
    try:
        import psutil
    except ImportError:
        return None
    try:
        return int(psutil.Process().memory_info().rss)
    except (psutil.Error, OSError):
        return None


def _proc_rss(status: Path = Path("/proc/self/status")) -> int | None:
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return None
    sizes = [line.split()[1] for line in lines if line.startswith("VmRSS:")]
    return int(sizes[0]) * 1024 if sizes else None


@dataclass(slots=True)
class TensorHandle:
    """A tensor in memory. `view` is its raw bytes, read only, valid until it is released."""

    tensor: Tensor
    view: Bytes
    region: mmap.mmap | None = field(repr=False)
    users: int = 0

    @property
    def mapped_bytes(self) -> int:
        """Bytes of address space that its map holds, whole pages; none for one that was read."""
        return len(self.region) if self.region is not None else 0

    def close(self) -> None:
        """Hand the pages back and drop the map; it is unmapped once no array looks into it."""
        region, self.region = self.region, None
        self.view = np.empty(0, np.uint8)
        if region is None:
            return
        if len(region) >= RETURN_BYTES and hasattr(region, "madvise"):
            region.madvise(mmap.MADV_DONTNEED)
        with contextlib.suppress(BufferError):
            region.close()


class MemoryManager:
    """Owns every map and unmap of a model's tensors, and the memory of those that are read.

    `acquire` maps a tensor or returns the map that is there; `release` gives it back. Beyond
    `cache_bytes` the least recently used maps that nobody holds are closed. Maps in use are never
    closed, so what is held at once is the caller's to bound.

    Two sorts of tensors are read instead, since mapping and unmapping on every walk costs more than
    copying: those that `keep` brought in for good, and those of the units that `stream` named,
    which pass through a few buffers. With `direct` reading goes past the page cache, as it should
    where memory cannot keep the file until the next walk. Thread-safe.
    """

    def __init__(
        self,
        source: ModelSource,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        probe: Probe = default_probe,
        *,
        direct: bool = False,
    ) -> None:
        self.cache_bytes = cache_bytes
        self._parts: dict[str, Tensor] = {}
        self._source = source
        self._probe = probe
        self._peak = 0
        self._lock = threading.Lock()
        self._handles: OrderedDict[str, TensorHandle] = OrderedDict()
        self._units: dict[str, Unit] = {}
        self._slots: Slots | None = None
        self._kept: Arena | None = None
        self._kept_bytes = 0
        self._files = WeightFiles(source.files, direct=direct)

    def acquire(self, name: str) -> TensorHandle:
        """The tensor `name` in memory, held until `release`. Raises `ModelDamaged` where there is
        none of that name or the file has shrunk."""
        unit = self._units.get(name)
        if unit is not None and self._slots is not None:
            memory = self._slots.hold(unit)
            view = _part(memory, unit.places[name], self._tensor(name).bytes)
            return self._use(name, lambda: TensorHandle(self._tensor(name), view, None))
        return self._use(name, lambda: self._map(name))

    def _use(self, name: str, make: Callable[[], TensorHandle]) -> TensorHandle:
        with self._lock:
            handle = self._handles.get(name)
            if handle is None:
                handle = self._handles[name] = make()
            handle.users += 1
            self._handles.move_to_end(name)
            self._evict()
            return handle

    def reserve(self, count: int) -> None:
        """Have room for `count` bytes that `keep` brings in; it is filled as they come."""
        self._kept = Arena(count)

    def keep(self, names: Sequence[str]) -> dict[str, TensorHandle]:
        """Tensors that stay: read together into what was reserved, or mapped and brought in where
        nothing was. Raises `ModelDamaged` as `acquire` does."""
        if self._kept is not None:
            unit = unit_of(self._tensor(name) for name in names)
            memory = self._kept.take(unit.bytes)
            self._files.fill(unit, memory)
            with self._lock:
                self._kept_bytes += unit.bytes
                for one in unit.tensors:
                    view = _part(memory, unit.places[one.name], one.bytes)
                    self._handles[one.name] = TensorHandle(one, view, None)
        handles = {name: self.acquire(name) for name in names}
        for handle in handles.values():
            _populate(handle)
        return handles

    def stream(self, units: Iterable[Sequence[str]], rooms: Sequence[int]) -> Slots:
        """From now on the tensors of each unit are read together, into buffers of `rooms` bytes,
        whenever one of them is acquired. Reading ahead is the business of the slots returned."""
        self._slots = Slots(self._files, Arena(sum(map(whole_pages, rooms))), rooms)
        for names in units:
            unit = unit_of(self._tensor(name) for name in names)
            self._units |= dict.fromkeys(names, unit)
        return self._slots

    def split(self, name: str, part_bytes: int) -> tuple[str, ...]:
        """Names by which parts of a matrix can be acquired: as many whole rows as `part_bytes`
        hold, one at the least; their `Tensor`s have the rows' shape."""
        tensor = self._tensor(name)
        rows, columns = tensor.shape
        row_bytes = tensor.bytes // rows
        step = max(1, part_bytes // row_bytes)
        names: list[str] = []
        for first in range(0, rows, step):
            count = min(step, rows - first)
            part = f"{name}[{first}:{first + count}]"
            self._parts[part] = replace(
                tensor,
                name=part,
                shape=(count, columns),
                offset=tensor.offset + first * row_bytes,
                bytes=count * row_bytes,
            )
            names.append(part)
        return tuple(names)

    def read(self, name: str, first: int = 0, count: int | None = None) -> Bytes:
        """`count` bytes of a tensor from its byte `first`, or all from there, in memory of their
        own. Raises `ModelDamaged` where the file lacks them."""
        tensor = self._tensor(name)
        first, end, _ = slice(first, None if count is None else first + count).indices(tensor.bytes)
        return self._files.read(tensor.file, tensor.offset + first, max(0, end - first))

    def read_rows(self, name: str, rows: NDArray[np.int64]) -> Bytes:
        """Bytes of a matrix's `rows`, and no more of it: (len(rows), bytes of a row)."""
        tensor = self._tensor(name)
        size = tensor.bytes // tensor.shape[0]
        found = np.empty((len(rows), size), np.uint8)
        for row, target in zip(rows.tolist(), found, strict=True):
            target[:] = self.read(name, row * size, size)
        return found

    def unit(self, name: str) -> Unit:
        """The unit that a streamed tensor belongs to."""
        return self._units[name]

    def release(self, name: str) -> None:
        """Give back one `acquire`; a map stays while the cap allows. Raises `ValueError` for a
        tensor that nobody holds."""
        unit = self._units.get(name)
        with self._lock:
            handle = self._handles.get(name)
            if handle is None or handle.users < 1:
                raise ValueError(f"tensor {name} was released more often than acquired")
            handle.users -= 1
            if unit is not None and not handle.users:
                del self._handles[name]
            self._evict()
        if unit is not None and self._slots is not None:
            self._slots.leave(unit)

    def drop(self, names: Iterable[str]) -> None:
        """Close these maps now unless somebody holds them, and hand back idle buffers."""
        if self._slots is not None:
            self._slots.drop()
        with self._lock:
            for name in names:
                handle = self._handles.get(name)
                if handle is not None and handle.users <= 0:
                    self._handles.pop(name).close()

    @property
    def resident_bytes(self) -> int:
        """Bytes of address space now mapped, and of memory that was read into."""
        read = self._kept_bytes + (self._slots.bytes if self._slots is not None else 0)
        with self._lock:
            return read + sum(handle.mapped_bytes for handle in self._handles.values())

    @property
    def idle_bytes(self) -> int:
        """Bytes of maps and buffers that nobody holds."""
        read = self._slots.idle_bytes if self._slots is not None else 0
        with self._lock:
            return read + sum(h.mapped_bytes for h in self._handles.values() if h.users <= 0)

    @property
    def mapped(self) -> tuple[str, ...]:
        """Names of tensors now mapped or held, least recently used first."""
        with self._lock:
            return tuple(self._handles)

    @property
    def peak_rss(self) -> int:
        """The largest resident size seen by the probe, which is asked again now."""
        self._peak = max(self._peak, self._probe())
        return self._peak

    def close(self) -> None:
        """Close every map and file, and hand back what was read."""
        if self._slots is not None:
            self._slots.close()
            self._slots.drop()
        with self._lock:
            for handle in self._handles.values():
                handle.close()
            self._handles.clear()
            self._files.close()
            if self._kept is not None:
                self._kept.close()

    def _tensor(self, name: str) -> Tensor:
        try:
            return self._parts.get(name) or self._source.tensors[name]
        except KeyError:
            raise ModelDamaged(f"{self._source.path.name} has no tensor {name}") from None

    def _map(self, name: str) -> TensorHandle:
        tensor = self._tensor(name)
        if tensor.bytes == 0:
            return TensorHandle(tensor, np.empty(0, np.uint8), None)
        start = tensor.offset - tensor.offset % mmap.ALLOCATIONGRANULARITY
        lead = tensor.offset - start
        try:
            region = mmap.mmap(
                self._files.number(tensor.file),
                lead + tensor.bytes,
                access=mmap.ACCESS_READ,
                offset=start,
            )
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in _TOO_MANY:
                raise DoesNotFit(
                    f"tensor {name} cannot be mapped: too many open files, wanted one for each",
                    fix="raise the limit of open files with ulimit -n",
                ) from error
            raise ModelDamaged(f"tensor {name} cannot be mapped: {error}") from error
        view = np.frombuffer(region, np.uint8, tensor.bytes, lead)
        return TensorHandle(tensor, view, region)

    def _evict(self) -> None:
        held = sum(handle.mapped_bytes for handle in self._handles.values())
        for name in [n for n, h in self._handles.items() if h.users <= 0]:
            if held <= self.cache_bytes:
                return
            handle = self._handles.pop(name)
            held -= handle.mapped_bytes
            handle.close()


def _part(memory: Bytes, start: int, count: int) -> Bytes:
    view = memory[start : start + count]
    view.flags.writeable = False
    return view


def _populate(handle: TensorHandle) -> None:
    """Have all of a map in memory; `mmap.madvise` would hold the interpreter's lock meanwhile."""
    if handle.region is None or not _LINUX:
        return
    address = int(handle.view.ctypes.data)
    start = address - address % mmap.PAGESIZE
    size = ctypes.c_size_t(address + handle.tensor.bytes - start)
    _c_library().madvise(ctypes.c_void_p(start), size, _POPULATE_READ)


@functools.cache
def _c_library() -> Any:
    return ctypes.CDLL(None)
