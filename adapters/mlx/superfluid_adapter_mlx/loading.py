"""From a folder to a model that serves: refuse, price, load, try it, record."""

from __future__ import annotations

import contextlib
import inspect
import shutil
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from superfluid_adapter_mlx.folder import Folder, facts_of, read_folder
from superfluid_adapter_mlx.memory import Plan, make_plan
from superfluid_compat.errors import (
    DoesNotFit,
    ModelDamaged,
    RuntimeBroken,
    SuperfluidError,
    UnsupportedArchitecture,
    UnsupportedType,
)
from superfluid_workerd.adapter import Device, LoadedModel, LoadRecord, OpenRequest, Options
from superfluid_workerd.limits import cores
from superfluid_workerd.tokenizing.folder import FolderTokenizer

if TYPE_CHECKING:
    from superfluid_adapter_mlx.model import Model
    from superfluid_adapter_mlx.runtime import Loaded

_STEP_TOKENS: Final = 2048
_EMBEDDINGS: Final = frozenset(
    {"embed_in", "embed_tokens", "embedding", "embeddings", "tok_embeddings", "word_embeddings",
     "wte"}
)  # fmt: skip
"""What mlx-lm's models call the module that token ids are looked up in."""

_STAGES: Final = 4
_NO_COMPILER: Final = "not compiled: there is no g++"


def load_tokenizer(model: Path, options: Options) -> FolderTokenizer:
    """The folder's tokenizer. Raises `ModelError`."""
    read_folder(model).require_no_code(bool(options.get("trust-model-code")))
    return FolderTokenizer(model)


def plan(request: OpenRequest) -> Plan:
    """The plan that `load` would load by; reads no weights. Raises as it does."""
    return _Loading(request, _admitted(request)).priced()[1]


def load(request: OpenRequest) -> LoadedModel:
    """Load as `Adapter.open` says; on the thread that will own MLX."""
    loading = _Loading(request, _admitted(request))
    try:
        return loading.load()
    except MemoryError as error:
        raise DoesNotFit(f"memory ran out while {request.model} was loaded") from error


def _admitted(request: OpenRequest) -> Folder:
    """The folder, when its code may run and its weights alone fit."""
    folder = read_folder(request.model)
    folder.require_no_code(bool(request.options["trust-model-code"]))
    if not (folder.path / "tokenizer.json").exists():
        raise ModelDamaged(f"{folder.path} has no tokenizer.json")
    make_plan(folder, request, 0)
    return folder


@dataclass(frozen=True, slots=True)
class _Loading:
    request: OpenRequest
    folder: Folder

    def priced(self) -> tuple[Model, Plan, int]:
        """The model with weights that are not read yet, the plan, a token's bytes by the model's
        own caches."""
        try:
            from superfluid_adapter_mlx import caches, trial
            from superfluid_adapter_mlx.engine import mx
            from superfluid_adapter_mlx.model import Model
        except ImportError as error:
            raise RuntimeBroken(f"mlx-lm does not start: {error}") from error
        _configure(mx, self.request.options)
        module = self._module()
        with self._running():
            model = Model(module, *self._widths(module))
            reason = caches.broken(model.fresh())
            token_bytes = trial.token_bytes(model)
        if reason is not None:
            raise UnsupportedArchitecture(
                f"{self.folder.path} ({self.folder.architecture}) needs caches that are wrong "
                f"here: {reason}",
                fix="serve it by an install of a newer mlx-lm",
            )
        return model, make_plan(self.folder, self.request, token_bytes), token_bytes

    def load(self) -> LoadedModel:
        request, folder = self.request, self.folder
        model, plan, token_bytes = self.priced()
        request.progress(1, _STAGES)
        from superfluid_adapter_mlx import caches, trial
        from superfluid_adapter_mlx.engine import mx
        from superfluid_adapter_mlx.envelope import Key
        from superfluid_adapter_mlx.runtime import Loaded, MlxRuntime
        from superfluid_adapter_mlx.shares import share_out

        where = device(mx)
        threads = (request.threads or cores()) if where.kind == "cpu" else None
        with ThreadPoolExecutor(1) as beside:
            # Weights and tokenizer take about as long to read, and neither needs the other's core.
            reading = beside.submit(FolderTokenizer, request.model)
            with self._reading():
                share_out(model.module, threads or 1)
                mx.eval(model.module.parameters())
            tokenizer = reading.result()
        request.progress(2, _STAGES)
        with self._running():
            template = trial.template(model)
            request.progress(3, _STAGES)
            alone = trial.batching_fault(model) if request.lanes > 1 else "one lane was asked for"
        kernels = _kernels(request.options, where)
        if kernels == _NO_COMPILER:
            print(f"mlx computes slower than it could: kernels are {kernels}", file=sys.stderr)
        if alone is not None and request.lanes > 1:
            print(f"mlx decodes one sequence per call: {alone}", file=sys.stderr)
        engine = f"mlx-lm {_version('mlx-lm')} ({caches.generation()})"
        loaded = Loaded(
            model=model,
            key=Key(folder.digest, engine),
            context=plan.context,
            lanes=request.lanes,
            tokens=plan.context * request.lanes,
            chunk=int(str(request.options["prefill-chunk"])),
            step_tokens=max(_STEP_TOKENS, request.lanes),
            token_bytes=token_bytes,
            weights=_weights(model.module),
            batching=alone is None,
            foreign=bool(request.options["foreign-state"]),
            template=template,
            devices=(where,),
        )
        mx.clear_cache()
        request.progress(_STAGES, _STAGES)
        return LoadedModel(
            runtime=MlxRuntime(loaded),
            tokenizer=tokenizer,
            facts=facts_of(folder),
            record=self._record(loaded, plan, threads, alone, kernels),
            template=folder.template,
            family=folder.architecture,
            plan=plan.parts,
        )

    def _module(self) -> Any:
        """mlx-lm's model; its weights are read when they are computed with. Raises `ModelError`."""
        from superfluid_adapter_mlx.engine import utils

        trusted = bool(self.request.options["trust-model-code"])
        settings: dict[str, Any] = {} if trusted else {"model_config": {"model_file": None}}
        if trusted and "trust_remote_code" in inspect.signature(utils.load_model).parameters:
            settings["trust_remote_code"] = True
        with self._reading():
            module, _ = utils.load_model(self.folder.path, lazy=True, **settings)
        return module

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """What mlx-lm raises here is a folder's fault."""
        try:
            yield
        except MemoryError:
            raise
        except Exception as error:
            told = " ".join(str(error).split())[:300]
            if isinstance(error, ValueError) and "not supported" in told:
                raise UnsupportedArchitecture(
                    f"{self.folder.path}: mlx-lm {_version('mlx-lm')} does not know "
                    f"{self.folder.architecture}"
                ) from error
            raise ModelDamaged(
                f"{self.folder.path} does not load: {type(error).__name__}: {told}"
            ) from error

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """What a model raises here is why it cannot be served."""
        try:
            yield
        except (SuperfluidError, MemoryError):
            raise
        except Exception as error:
            told = " ".join(str(error).split())[:300]
            kind = UnsupportedType if "only supports float32" in told else UnsupportedArchitecture
            raise kind(
                f"{self.folder.path} loads but does not run: {type(error).__name__}: {told}"
            ) from error

    def _widths(self, module: Any) -> tuple[int, int]:
        """Logits of a row, and ids that may be given."""
        from superfluid_adapter_mlx.engine import mx

        rows = [
            int(part.weight.shape[0])
            for name, part in module.named_modules()
            if name.rpartition(".")[2] in _EMBEDDINGS and type(part).__name__.endswith("Embedding")
        ]
        width = int(module(mx.array([[0]])).shape[-1])
        stated = self.folder.number("vocab_size")
        return width, min([width, *rows[:1], *([stated] if stated else [])])

    def _record(
        self, loaded: Loaded, plan: Plan, threads: int | None, alone: str | None, kernels: str
    ) -> LoadRecord:
        return self.request.record(
            context=loaded.context,
            threads=threads,
            memory_budget=plan.total,
            own={
                "mlx": _version("mlx"),
                "mlx-lm": _version("mlx-lm"),
                "caches": loaded.key.engine,
                "token-bytes": loaded.token_bytes,
                "decoding": "together" if alone is None else f"one sequence per call: {alone}",
                "sequences": "copied and moved" if loaded.template else "neither copied nor moved",
                "kernels": kernels,
                "devices": [each.name for each in loaded.devices],
            },
        )


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


def _kernels(options: Options, where: Device) -> str:
    """How what a model computes in one go is computed. MLX itself says nothing of it."""
    if not options["compile"]:
        return "not compiled, as asked"
    if where.kind == "cpu" and shutil.which("g++") is None:
        return _NO_COMPILER
    return "compiled"


def _weights(module: Any) -> int:
    from superfluid_adapter_mlx.caches import arrays_in

    return sum(array.nbytes for array in arrays_in(module.parameters()))


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)
