"""From a folder to a model that serves: refuse, check memory, load, try it, record."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from superfluid_adapter_mlx.folder import Folder, facts_of, read_folder, template_of
from superfluid_adapter_mlx.memory import fit_context, require_weights, room
from superfluid_adapter_mlx.tokenizer import FolderTokenizer
from superfluid_compat.errors import (
    DoesNotFit,
    ModelDamaged,
    ModelError,
    RuntimeBroken,
    SuperfluidError,
    UnsupportedArchitecture,
    UnsupportedType,
)
from superfluid_workerd.adapter import Device, LoadedModel, LoadRecord, OpenRequest, Options

_STEP_TOKENS: Final = 2048
_EMBEDDINGS: Final = frozenset(
    {"embed_in", "embed_tokens", "embedding", "embeddings", "tok_embeddings", "word_embeddings",
     "wte"}
)  # fmt: skip
"""What mlx-lm's models call the module that token ids are looked up in."""

_STAGES: Final = 4


def load_tokenizer(model: Path, options: Options) -> FolderTokenizer:
    """The folder's tokenizer. Raises `ModelError`."""
    read_folder(model).require_no_code(bool(options.get("trust-model-code")))
    return FolderTokenizer(model)


def load(request: OpenRequest) -> LoadedModel:
    """Load as `Adapter.open` says; on the thread that will own MLX."""
    folder = read_folder(request.model)
    folder.require_no_code(bool(request.options["trust-model-code"]))
    within = room(request.memory_budget)
    parts = require_weights(folder, within)
    tokenizer = FolderTokenizer(request.model)
    request.progress(1, _STAGES)
    try:
        return _Loading(request, folder, tokenizer).load(parts)
    except MemoryError as error:
        raise DoesNotFit(f"memory ran out while {folder.path} was loaded") from error


@dataclass(frozen=True, slots=True)
class _Loading:
    request: OpenRequest
    folder: Folder
    tokenizer: FolderTokenizer

    def load(self, parts: dict[str, int]) -> LoadedModel:
        request, folder = self.request, self.folder
        try:
            from superfluid_adapter_mlx import caches, trial
            from superfluid_adapter_mlx.engine import mx
            from superfluid_adapter_mlx.envelope import Key
            from superfluid_adapter_mlx.model import Model
            from superfluid_adapter_mlx.runtime import Loaded, MlxRuntime
        except ImportError as error:
            raise RuntimeBroken(f"mlx-lm does not start: {error}") from error
        _configure(mx, request.options)
        module = self._module()
        request.progress(2, _STAGES)
        model = Model(module, *self._widths(module))
        if (reason := caches.broken(model.fresh())) is not None:
            raise UnsupportedArchitecture(
                f"{folder.path} ({folder.architecture}) needs caches that are wrong here: {reason}",
                fix="serve it by an install of a newer mlx-lm",
            )
        try:
            token_bytes = trial.token_bytes(model)
            moves = trial.copies(model)
            template = model.template() if moves else None
            request.progress(3, _STAGES)
            alone = trial.batching_fault(model) if request.lanes > 1 else "one lane was asked for"
        except SuperfluidError:
            raise
        except Exception as error:
            raise _does_not_run(folder, error) from error
        within = room(request.memory_budget)
        left = within.bytes - (sum(parts.values()) if within.given else parts["reserve"] // 2)
        context = fit_context(folder, request, token_bytes, left=left, within=within)
        parts["sequences"] = context * request.lanes * token_bytes
        if alone is not None and request.lanes > 1:
            print(f"mlx decodes one sequence per call: {alone}", file=sys.stderr)
        engine = f"mlx-lm {_version('mlx-lm')} ({caches.generation()})"
        chunk = int(str(request.options["prefill-chunk"]))
        loaded = Loaded(
            model=model,
            key=Key(folder.digest, engine),
            context=context,
            lanes=request.lanes,
            tokens=context * request.lanes,
            chunk=chunk,
            step_tokens=max(_STEP_TOKENS, request.lanes),
            token_bytes=token_bytes,
            weights=_weights(module),
            batching=alone is None,
            foreign=bool(request.options["foreign-state"]),
            template=template,
            devices=(device(mx),),
        )
        mx.clear_cache()
        request.progress(_STAGES, _STAGES)
        return LoadedModel(
            runtime=MlxRuntime(loaded),
            tokenizer=self.tokenizer,
            facts=facts_of(folder),
            record=self._record(loaded, alone),
            template=template_of(folder.path),
            family=folder.architecture,
            plan=parts,
        )

    def _module(self) -> Any:
        """mlx-lm's model with its weights. Raises `ModelError`."""
        from superfluid_adapter_mlx.engine import utils

        trusted = bool(self.request.options["trust-model-code"])
        settings: dict[str, Any] = {} if trusted else {"model_config": {"model_file": None}}
        if trusted and "trust_remote_code" in inspect.signature(utils.load_model).parameters:
            settings["trust_remote_code"] = True
        try:
            module, _ = utils.load_model(self.folder.path, **settings)
        except MemoryError:
            raise
        except Exception as error:
            told = " ".join(str(error).split())[:300]
            if "not supported" in told:
                raise UnsupportedArchitecture(
                    f"{self.folder.path}: mlx-lm {_version('mlx-lm')} does not know "
                    f"{self.folder.architecture}"
                ) from error
            raise ModelDamaged(
                f"{self.folder.path} does not load: {type(error).__name__}: {told}"
            ) from error
        return module

    def _widths(self, module: Any) -> tuple[int, int]:
        """Logits of a row, and ids that may be given."""
        from superfluid_adapter_mlx.engine import mx

        rows = [
            int(part.weight.shape[0])
            for name, part in module.named_modules()
            if name.rpartition(".")[2] in _EMBEDDINGS and type(part).__name__.endswith("Embedding")
        ]
        try:
            logits = module(mx.array([[0]]))
            mx.eval(logits)
        except Exception as error:
            raise _does_not_run(self.folder, error) from error
        width = int(logits.shape[-1])
        stated = self.folder.number("vocab_size")
        return width, min([width, *rows[:1], *([stated] if stated else [])])

    def _record(self, loaded: Any, alone: str | None) -> LoadRecord:
        request = self.request
        asked: dict[str, Any] = {
            "context": request.context,
            "lanes": request.lanes,
            "threads": request.threads,
            "memory-budget": request.memory_budget,
            **{name: value for name, value in request.options.items() if value is not None},
        }
        got: dict[str, Any] = {
            "context": loaded.context,
            "lanes": loaded.lanes,
            "mlx": _version("mlx"),
            "mlx-lm": _version("mlx-lm"),
            "caches": loaded.key.engine,
            "token-bytes": loaded.token_bytes,
            "decoding": "together" if alone is None else f"one sequence per call: {alone}",
            "sequences": "copied and moved" if loaded.template else "neither copied nor moved",
            "devices": [each.name for each in loaded.devices],
        }
        return LoadRecord(asked=asked, got=got)


def device(mx: Any) -> Device:
    """What MLX computes on."""
    kind = "gpu" if "gpu" in str(mx.default_device()) else "cpu"
    told: Mapping[str, Any] = mx.device_info() if hasattr(mx, "device_info") else {}
    name = str(told.get("device_name") or ("Metal" if kind == "gpu" else "CPU"))
    return Device(name=name, kind=kind)


def _configure(mx: Any, options: Options) -> None:
    if not options["compile"]:
        mx.disable_compile()
    limit = options["cache-limit-mb"]
    if isinstance(limit, int):
        mx.set_cache_limit(limit << 20)


def _does_not_run(folder: Folder, error: Exception) -> ModelError:
    told = " ".join(str(error).split())[:300]
    kind = UnsupportedType if "only supports float32" in told else UnsupportedArchitecture
    return kind(f"{folder.path} loads but does not run: {type(error).__name__}: {told}")


def _weights(module: Any) -> int:
    from superfluid_adapter_mlx.caches import arrays_in

    return sum(array.nbytes for array in arrays_in(module.parameters()))


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)
