"""The last proof of a layout: a tiny model opened with odd values, read back through getters.

    python -m superfluid_adapter_llamacpp.canary LIB NUMBER

prints one line of JSON. A wrong layout ends this process by a signal or shows in a value. The model
is a file without a name, so that nothing is left of it however this process ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from superfluid_adapter_llamacpp.batch import PlainBatch
from superfluid_adapter_llamacpp.contained import contain
from superfluid_adapter_llamacpp.contracts import Contract, contracts
from superfluid_adapter_llamacpp.library import Library, load
from superfluid_adapter_llamacpp.params import address, patched
from superfluid_adapter_llamacpp.symbols import AbortCallback, ProgressCallback
from superfluid_adapter_llamacpp.tiny import LAYERS, WIDTH, tiny_model

_CONTEXT: Final = {
    "n_ctx": 768,
    "n_batch": 96,
    "n_ubatch": 48,
    "n_seq_max": 3,
    "n_threads": 1,
    "n_threads_batch": 2,
    "pooling_type": 3,
    "flash_attn_type": 0,
    "type_k": 0,
    "type_v": 0,
    "embeddings": 1,
    "kv_unified": 1,
}
_GETTERS: Final = {
    "n_ctx": "llama_n_ctx",
    "n_batch": "llama_n_batch",
    "n_ubatch": "llama_n_ubatch",
    "n_seq_max": "llama_n_seq_max",
    "n_threads": "llama_n_threads",
    "n_threads_batch": "llama_n_threads_batch",
    "pooling_type": "llama_pooling_type",
}
_TOKENS: Final = (1, 40, 77, 50, 60)
_MARKER: Final = 0x5F10D
_F32_BYTES: Final = 4
_ABORTED: Final = 2


class Sung(msgspec.Struct, frozen=True):
    """What the canary found: nothing wrong, or the first thing that was."""

    wrong: str = ""


class _Wrong(Exception):
    pass


def _expect(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise _Wrong(f"{what} is {found}, wanted {wanted}")


def _require(held: bool, otherwise: str) -> None:
    if not held:
        raise _Wrong(otherwise)


class _Canary:
    def __init__(self, library: Library, contract: Contract) -> None:
        self._library, self._contract = library, contract
        self._call: Any = library.call
        self._markers: dict[str, int] = {}
        self._aborting = False
        self._progress = ProgressCallback(self._progressed)
        self._abort = AbortCallback(self._aborts)

    def sing(self, model: str) -> None:
        """Raises `_Wrong`."""
        for _ in self._steps(model):
            pass

    def _steps(self, model: str) -> Iterator[None]:
        call = self._call
        params = patched(call.llama_model_default_params, self._contract.model, {
            "n_gpu_layers": 0,
            "progress_callback": address(self._progress),
            "progress_callback_user_data": _MARKER,
        })  # fmt: skip
        loaded = call.llama_model_load_from_file(os.fsencode(model), params)
        _require(bool(loaded), "a model does not load")
        _require(self._markers.get("progress") == _MARKER, "progress is told to somebody else")
        yield
        params = patched(call.llama_context_default_params, self._contract.context, {
            **_CONTEXT,
            "abort_callback": address(self._abort),
            "abort_callback_data": _MARKER,
        })  # fmt: skip
        context = call.llama_init_from_model(loaded, params)
        _require(bool(context), "no context opens")
        for name, getter in _GETTERS.items():
            _expect(name, getattr(call, getter)(context), _CONTEXT[name])
        _expect("n_ctx_seq of a unified cache", call.llama_n_ctx_seq(context), _CONTEXT["n_ctx"])
        yield
        self._aborting = True
        _expect("the answer of a decode that is aborted", self._decode(context), _ABORTED)
        _require(self._markers.get("abort") == _MARKER, "somebody else is asked whether to abort")
        self._aborting = False
        memory = call.llama_get_memory(context)
        call.llama_memory_clear(memory, True)
        _expect("the answer of a decode", self._decode(context), 0)
        yield
        embedded = call.llama_get_embeddings_seq(context, 1)
        _require(bool(embedded), "no embedding is pooled")
        least = 2 * LAYERS * len(_TOKENS) * WIDTH * _F32_BYTES
        size = call.llama_state_seq_get_size(context, 1)
        _require(size >= least, f"a state of F32 keys and values has {size} bytes")
        call.llama_free(context)
        call.llama_model_free(loaded)

    def _decode(self, context: int) -> int:
        batch = PlainBatch(_TOKENS, 0, 1, range(len(_TOKENS)))
        return int(self._call.llama_decode(context, batch.batch))

    def _progressed(self, _share: float, data: int | None) -> bool:
        self._markers["progress"] = data or 0
        return True

    def _aborts(self, data: int | None) -> bool:
        self._markers["abort"] = data or 0
        return self._aborting


def _answer(library: Path, number: int, answers: int) -> None:
    loaded = load(library)
    with _nameless(tiny_model()) as model:
        try:
            _Canary(loaded, contracts()[number]).sing(model)
            sung = Sung()
        except _Wrong as error:
            said = loaded.log.reason("").replace(model, "the model")
            sung = Sung(f"{error} ({said})" if said else str(error))
    os.write(answers, msgspec.json.encode(sung) + b"\n")


@contextlib.contextmanager
def _nameless(content: bytes) -> Iterator[str]:
    """A path to `content` that only this process has: in memory where the system can, else in a
    file that is unlinked before it is written."""
    with _open() as file:
        file.write(content)
        file.flush()
        # Some systems open a descriptor's path as a copy of it, which shares its position.
        file.seek(0)
        yield f"/dev/fd/{file.fileno()}"


def _open() -> IO[bytes]:
    if sys.platform == "linux":
        return open(os.memfd_create("canary.gguf"), "w+b")
    return tempfile.TemporaryFile()


def main() -> None:
    library, number = sys.argv[1:]
    contain(lambda answers: _answer(Path(library), int(number), answers))


if __name__ == "__main__":
    main()
