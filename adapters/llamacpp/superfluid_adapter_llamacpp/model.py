"""A model that libllama has loaded, and what kind it is. Freed with its last user."""

from __future__ import annotations

import ctypes as ct
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from superfluid_adapter_llamacpp.contracts import Contract
from superfluid_adapter_llamacpp.library import Library
from superfluid_adapter_llamacpp.params import address, patched
from superfluid_adapter_llamacpp.symbols import ProgressCallback
from superfluid_compat.errors import DoesNotFit, ModelDamaged, ModelError, UnsupportedArchitecture

_STEPS: Final = 1000
_REASONS: Final[tuple[tuple[str, type[ModelError]], ...]] = (
    ("unknown model architecture", UnsupportedArchitecture),
    ("unable to allocate", DoesNotFit),
    ("failed to allocate", DoesNotFit),
    ("bad_alloc", DoesNotFit),
    ("mmap failed", DoesNotFit),
)
"""Words in the library's error lines, and what they mean; any other reason is damage."""


class Model:
    """One loaded model. `pointer` is valid as long as this object is."""

    def __init__(
        self,
        library: Library,
        contract: Contract,
        path: Path,
        members: Mapping[str, float],
        *,
        split: tuple[float, ...] = (),
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Raises `ModelError`, its reason the library's own last error lines."""
        call = library.call
        self.library, self.contract = library, contract
        kept = ProgressCallback(_teller(progress))
        shares = (ct.c_float * max(16, call.llama_max_devices(), len(split)))(*split)
        pointers = {"progress_callback": address(kept)}
        if split:
            pointers["tensor_split"] = address(shares)
        params = patched(call.llama_model_default_params, contract.model, {**members, **pointers})
        library.log.clear()
        pointer = call.llama_model_load_from_file(os.fsencode(path), params)
        if not pointer:
            raise failure(library, f"{path} does not load")
        self.pointer: int = pointer
        self.vocabulary: int = call.llama_model_get_vocab(pointer)
        weakref.finalize(self, call.llama_model_free, pointer).atexit = False

    def ask(self, name: str) -> Any:
        """What a getter of the model says: `ask("n_swa")`."""
        return getattr(self.library.call, f"llama_model_{name}")(self.pointer)


def failure(library: Library, what: str) -> ModelError:
    """The library's last error lines as an error of ours."""
    reason = library.log.reason("it gives no reason")
    kind = next((kind for words, kind in _REASONS if words in reason), ModelDamaged)
    return kind(f"{what}: llama.cpp says {reason[:500]}")


def _teller(progress: Callable[[int, int], None]) -> Callable[[float, Any], bool]:
    def tell(share: float, _data: Any) -> bool:
        progress(int(share * _STEPS), _STEPS)
        return True

    return tell
