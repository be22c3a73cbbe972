"""Every map of a model's weights, and how much memory they may hold."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from superfluid_adapter_native.formats.source import ModelSource, Tensor
from superfluid_compat.errors import ModelDamaged, ModelNotFound

Bytes = NDArray[np.uint8]
Probe = Callable[[], int]
"""The process's resident bytes now."""

DEFAULT_CACHE_BYTES: Final = 256 << 20
RETURN_BYTES: Final = 1 << 20
"""Maps of this size and more are handed back to the system explicitly when they close."""
_POPULATE_READ: Final = 22
"""Linux's MADV_POPULATE_READ (5.14), which `mmap` has no name for."""
_FETCH_BYTES: Final = 4 << 20
_LINUX: Final = sys.platform == "linux"
_PAGE: Final = mmap.PAGESIZE


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
    """A mapped tensor. `view` is its raw bytes, read only, valid until the handle is closed."""

    tensor: Tensor
    view: Bytes
    region: mmap.mmap | None = field(repr=False)
    users: int = 0

    @property
    def mapped_bytes(self) -> int:
        """Bytes of address space that the map holds, whole pages."""
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
    """Owns every map and unmap of a model's tensors.

    `acquire` maps a tensor or returns the map that is there; `release` gives it back. Beyond
    `cache_bytes` the least recently used maps that nobody holds are closed. Maps in use are never
    closed, so what is held at once is the caller's to bound. With `forget` the system is told to
    drop the file's pages too, as it should where memory cannot keep them until the next walk.
    Thread-safe.
    """

    def __init__(
        self,
        source: ModelSource,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        probe: Probe = default_probe,
        *,
        forget: bool = False,
    ) -> None:
        self.cache_bytes = cache_bytes
        self._forget = forget and _LINUX
        self._parts: dict[str, Tensor] = {}
        self._source = source
        self._probe = probe
        self._peak = 0
        self._lock = threading.Lock()
        self._handles: OrderedDict[str, TensorHandle] = OrderedDict()
        self._files: list[int] = []
        for path in source.files:
            try:
                self._files.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            except OSError as error:
                self.close()
                raise ModelNotFound(f"{path} cannot be opened: {error.strerror}") from error

    def acquire(self, name: str) -> TensorHandle:
        """The mapped tensor `name`, held until `release`. Raises `ModelDamaged` where there is
        none of that name or the file has shrunk."""
        with self._lock:
            handle = self._handles.get(name)
            if handle is None:
                handle = self._handles[name] = self._map(name)
            handle.users += 1
            self._handles.move_to_end(name)
            self._evict()
            return handle

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

    def read_rows(self, name: str, rows: NDArray[np.int64]) -> Bytes:
        """Bytes of a matrix's `rows`, read without mapping it: (len(rows), bytes of a row)."""
        tensor = self._tensor(name)
        row_bytes = tensor.bytes // tensor.shape[0]
        found = np.empty((len(rows), row_bytes), np.uint8)
        for row, target in zip(rows.tolist(), found, strict=True):
            at = tensor.offset + row * row_bytes
            if os.preadv(self._files[tensor.file], [target.data], at) != row_bytes:
                raise ModelDamaged(f"tensor {name} ends before its row {row}")
        return found

    def fetch(
        self,
        handle: TensorHandle,
        span: slice | None = None,
        *,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Have the bytes `span` of an acquired tensor, or all, in memory and mapped; returns when
        they are or when `stop()` says so. The whole is asked of the system before it is waited for,
        so that its disk is busy throughout."""
        region, tensor = handle.region, handle.tensor
        if region is None or not _LINUX:
            return
        first, end, _ = (span or slice(None)).indices(tensor.bytes)
        file, start = self._files[tensor.file], tensor.offset + first
        _advise(file, start, end - first, os.POSIX_FADV_WILLNEED)
        address = int(handle.view.__array_interface__["data"][0])
        for at in range(address + first, address + end, _FETCH_BYTES):
            if stop():
                return
            _populate(at, min(_FETCH_BYTES, address + end - at))

    def release(self, name: str) -> None:
        """Give back one `acquire`; the map stays while the cap allows. Raises `ValueError` for a
        tensor that nobody holds."""
        with self._lock:
            handle = self._handles.get(name)
            if handle is None or handle.users < 1:
                raise ValueError(f"tensor {name} was released more often than acquired")
            handle.users -= 1
            self._evict()

    def drop(self, names: Iterable[str]) -> None:
        """Close these maps now unless somebody holds them."""
        with self._lock:
            for name in names:
                handle = self._handles.get(name)
                if handle is not None and handle.users <= 0:
                    self._close(self._handles.pop(name))

    @property
    def resident_bytes(self) -> int:
        """Bytes of address space now mapped."""
        with self._lock:
            return sum(handle.mapped_bytes for handle in self._handles.values())

    @property
    def idle_bytes(self) -> int:
        """Bytes of maps that nobody holds."""
        with self._lock:
            return sum(h.mapped_bytes for h in self._handles.values() if h.users <= 0)

    @property
    def mapped(self) -> tuple[str, ...]:
        """Names now mapped, least recently used first."""
        with self._lock:
            return tuple(self._handles)

    @property
    def peak_rss(self) -> int:
        """The largest resident size seen by the probe, which is asked again now."""
        self._peak = max(self._peak, self._probe())
        return self._peak

    def close(self) -> None:
        """Close every map and file."""
        with self._lock:
            for handle in self._handles.values():
                handle.close()
            self._handles.clear()
            for number in self._files:
                os.close(number)
            self._files.clear()

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
                self._files[tensor.file], lead + tensor.bytes, access=mmap.ACCESS_READ, offset=start
            )
        except (OSError, ValueError) as error:
            raise ModelDamaged(f"tensor {name} cannot be mapped: {error}") from error
        if len(tensor.shape) > 2 and hasattr(mmap, "MADV_RANDOM"):
            # Of experts only some are read: the system's reading around a page would add others.
            region.madvise(mmap.MADV_RANDOM)
        view = np.frombuffer(region, np.uint8, tensor.bytes, lead)
        return TensorHandle(tensor, view, region)

    def _evict(self) -> None:
        held = sum(handle.mapped_bytes for handle in self._handles.values())
        for name in [n for n, h in self._handles.items() if h.users <= 0]:
            if held <= self.cache_bytes:
                return
            handle = self._handles.pop(name)
            held -= handle.mapped_bytes
            self._close(handle)

    def _close(self, handle: TensorHandle) -> None:
        mapped = handle.mapped_bytes >= RETURN_BYTES
        handle.close()
        if mapped and self._forget:
            tensor = handle.tensor
            file = self._files[tensor.file]
            _advise(file, tensor.offset, tensor.bytes, os.POSIX_FADV_DONTNEED)


def _advise(file: int, start: int, count: int, advice: int) -> None:
    """It is advice: a file system that takes none still reads."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(file, start, count, advice)


def _populate(address: int, count: int) -> None:
    """Read and map pages; `mmap.madvise` would hold the interpreter's lock meanwhile."""
    start = address - address % _PAGE
    size = address + count - start
    _c_library().madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _POPULATE_READ)


@functools.cache
def _c_library() -> Any:
    return ctypes.CDLL(None)
