"""From a header to a model that serves: price, judge the library, load, open a context, record."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from superfluid_adapter_llamacpp.context import Context
from superfluid_adapter_llamacpp.contracts import Contract, contracts
from superfluid_adapter_llamacpp.embedding import LlamaEmbedder
from superfluid_adapter_llamacpp.facts import (
    POOLINGS,
    TEMPLATE_KEY,
    check_vocabulary,
    facts_of,
    pooling,
)
from superfluid_adapter_llamacpp.gguf import Header, read_header
from superfluid_adapter_llamacpp.heads import head_widths
from superfluid_adapter_llamacpp.library import Library, NotLoadable
from superfluid_adapter_llamacpp.library import load as load_library
from superfluid_adapter_llamacpp.model import Model
from superfluid_adapter_llamacpp.plan import Plan, Shape, make_plan
from superfluid_adapter_llamacpp.probe import Finding
from superfluid_adapter_llamacpp.runtime import Kind, LlamaRuntime, Loaded
from superfluid_adapter_llamacpp.settings import (
    ALL_LAYERS,
    Settings,
    check_devices,
    check_head,
    load_members,
)
from superfluid_adapter_llamacpp.state import state_key
from superfluid_adapter_llamacpp.tokenizer import LlamaTokenizer
from superfluid_adapter_llamacpp.where import named_library, require
from superfluid_compat.errors import DoesNotFit, RuntimeBroken, UnsupportedArchitecture
from superfluid_workerd.adapter import LoadedModel, LoadRecord, OpenRequest, Options, Runtime
from superfluid_workerd.limits import cores

_CAP_IPC_LOCK: Final = 14
_GPU: Final = "gpu"


@dataclass(frozen=True, slots=True)
class Opened:
    """A library that was judged, loaded and found to keep its contract."""

    library: Library
    contract: Contract
    finding: Finding

    @property
    def gpus(self) -> int:
        return sum(device.kind == _GPU for device in self.finding.devices)


def open_library(options: Options, installed: Path | None, cache: Path | None) -> Opened:
    """Judge, then load. Raises `RuntimeUnavailable`."""
    finding = require(named_library(options, installed), cache)
    if finding.contract is None:
        raise RuntimeBroken(f"{finding.path} was found to keep no contract")
    try:
        library = load_library(Path(finding.path))
    except NotLoadable as error:
        raise RuntimeBroken(
            str(error),
            fix="see that the library and what lies beside it can be read and are of one build",
        ) from error
    return Opened(library, contracts()[finding.contract], finding)


def load(request: OpenRequest, installed: Path | None) -> LoadedModel:
    """Load as `Adapter.open` says. The plan is made before any weight is read."""
    header = read_header(request.model)
    settings = Settings.of(request.options)
    plan = make_plan(header, settings, request)
    opened = open_library(request.options, installed, request.shared)
    check_devices(settings, opened.gpus)
    _check_lock(settings, header)
    return _Assembly(request, header, settings, opened).load(plan)


def vet(model: Path, options: Options, installed: Path | None, shared: Path | None) -> None:
    """Have the library read everything of the model but its weights. Raises `ModelError`,
    `BadOptionValue`."""
    header, settings = read_header(model), Settings.of(options)
    check_head(settings, *head_widths(header))
    _check_lock(settings, header)
    opened = open_library(options, installed, shared)
    members = {**load_members("none", opened.contract.model), "n_gpu_layers": 0, "no_alloc": 1}
    _check_kind(Model(opened.library, opened.contract, model, members), header)


def load_tokenizer(
    model: Path, options: Options, installed: Path | None, shared: Path | None
) -> LlamaTokenizer:
    """The vocabulary alone."""
    check_vocabulary(read_header(model))
    opened = open_library(options, installed, shared)
    return LlamaTokenizer(Model(opened.library, opened.contract, model, {"vocab_only": 1}))


def _check_lock(settings: Settings, header: Header) -> None:
    """llama.cpp serves on when it may not lock; who asked for locked weights wants them locked."""
    mode = settings.text("load-mode") or ""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if (
        "mlock" in mode
        and not _may_lock()
        and soft != resource.RLIM_INFINITY
        and soft < header.size
    ):
        raise DoesNotFit(
            f"load-mode {mode} locks {header.size} bytes, a worker may lock {soft}",
            fix="raise the limit (ulimit -l), or give --llamacpp-load-mode mmap",
            param="load-mode",
        )


def _may_lock() -> bool:
    """Whether limits do not count: by its capability, which a confined worker of root has not."""
    try:
        rows = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return os.geteuid() == 0
    held = next((int(row.split()[1], 16) for row in rows if row.startswith("CapEff:")), 0)
    return bool(held >> _CAP_IPC_LOCK & 1)


@dataclass(frozen=True, slots=True)
class _Assembly:
    """Puts the runtime's parts together by the plan."""

    request: OpenRequest
    header: Header
    settings: Settings
    opened: Opened

    def load(self, plan: Plan) -> LoadedModel:
        context_members = self.settings.context_members(self.opened.contract)
        model = Model(
            self.opened.library,
            self.opened.contract,
            self.request.model,
            self._model_members(),
            split=self.settings.tensor_split,
            progress=self.request.progress,
        )
        _check_kind(model, self.header)
        shape = self._shape(model)
        if shape != Shape.of(self.header):
            held = plan.parts["interpreter"]
            plan = make_plan(self.header, self.settings, self.request, shape, held)
        threads, members = self._threads(), self._context_members(plan)
        context = Context(model, {**context_members, **members, **threads})
        self._check_got(context, plan)
        template = self.header.metadata.get(TEMPLATE_KEY)
        return LoadedModel(
            runtime=self._runtime(self._loaded(model, context, plan, shape)),
            tokenizer=LlamaTokenizer(model),
            facts=facts_of(self.header),
            record=self._record(context, plan, threads),
            template=template if isinstance(template, str) else None,
            family=self.header.architecture,
            plan=dict(plan.parts),
        )

    def _model_members(self) -> dict[str, float]:
        members = self.settings.model_members(self.opened.contract)
        # Damaged weights are found while loading, unless they are not to be read then.
        checks = self.settings.text("lazy-mode") != "on"
        return {**members, "check_tensors": int(checks)}

    def _shape(self, model: Model) -> Shape:
        return Shape(
            window=int(model.ask("n_swa")),
            recurrent=bool(model.ask("is_recurrent") or model.ask("is_hybrid")),
            embeds=Shape.of(self.header).embeds,
        )

    def _context_members(self, plan: Plan) -> dict[str, float]:
        members = {
            "n_ctx": plan.cells,
            "n_batch": plan.batch,
            "n_ubatch": plan.ubatch,
            "n_seq_max": plan.sequences,
            "n_outputs_max": plan.outputs,
            "kv_unified": 1,
        }
        if plan.embeds:
            members |= {"embeddings": 1, "pooling_type": POOLINGS.index(pooling(self.header))}
        known = self.opened.contract.context.fields
        return {name: value for name, value in members.items() if name in known}

    def _threads(self) -> dict[str, int]:
        common = self.request.threads or cores()
        decode = self.settings.number("threads") or common
        return {
            "n_threads": decode,
            "n_threads_batch": self.settings.number("threads-batch") or decode,
        }

    def _check_got(self, context: Context, plan: Plan) -> None:
        if context.sequences < self.request.lanes or context.cells < plan.cells:
            raise DoesNotFit(
                f"{plan.sequences} sequences and {plan.cells} cells were asked for, llama.cpp "
                f"gave {context.sequences} and {context.cells}"
            )

    def _loaded(self, model: Model, context: Context, plan: Plan, shape: Shape) -> Loaded:
        return Loaded(
            model=model,
            context=context,
            plan=plan,
            kind=self._kind(shape),
            window=shape.window,
            key=state_key(
                self.opened.finding.digest,
                self.header.fingerprint.hex(),
                *(self.settings.text(name) for name in ("cache-type-k", "cache-type-v")),
                self.settings.text("flash-attn"),
                self.settings.flag("swa-full"),
                self.settings.positions(),
            ),
            weights=int(model.ask("size")),
            cell_bytes=plan.parts["kv"] // max(1, plan.cells),
            devices=self.opened.finding.devices,
        )

    def _runtime(self, loaded: Loaded) -> Runtime:
        if loaded.plan.embeds:
            return LlamaEmbedder(loaded, pooling(self.header))
        return LlamaRuntime(loaded)

    def _kind(self, shape: Shape) -> Kind:
        if shape.recurrent:
            return "recurrent"
        return "window" if shape.window and not self.settings.flag("swa-full") else "plain"

    def _record(self, context: Context, plan: Plan, threads: Mapping[str, int]) -> LoadRecord:
        finding = self.opened.finding
        own = {
            "threads-batch": threads["n_threads_batch"],
            "library": finding.path,
            "library-version": finding.version,
            "contract": finding.contract,
            "sequences": context.sequences,
            "cells": context.cells,
            "batch-size": context.batch,
            "ubatch-size": context.ubatch,
            "flash-attn": self.settings.text("flash-attn"),
            "swa-full": self.settings.flag("swa-full"),
            "kv-offload": self._offloads("kv-offload"),
            "op-offload": self._offloads("op-offload"),
            "cache-type-k": self.settings.text("cache-type-k"),
            "cache-type-v": self.settings.text("cache-type-v"),
            "devices": [device.name for device in finding.devices],
            "n-gpu-layers": self._placed(),
        }
        if plan.embeds:
            own["pooling"] = pooling(self.header)
        return self.request.record(
            context=plan.context, threads=threads["n_threads"], memory_budget=plan.total, own=own
        )

    def _offloads(self, name: str) -> bool:
        """Whether there is a GPU for what is to be there."""
        return bool(self.opened.gpus) and self.settings.flag(name)

    def _placed(self) -> int | str:
        """Layers on GPUs: none without one; what llama.cpp chose itself it does not tell."""
        if not self.opened.gpus:
            return 0
        layers, most = self.settings.gpu_layers, self.header.number("block_count") + 1
        if layers >= 0:
            return min(layers, most)
        return most if layers == ALL_LAYERS else "auto"


def _check_kind(model: Model, header: Header) -> None:
    if model.ask("is_diffusion"):
        found = "a diffusion model"
    elif model.ask("has_encoder") and model.ask("has_decoder"):
        found = "an encoder with a decoder"
    else:
        return
    raise UnsupportedArchitecture(
        f"{header.path} is {found} ({header.architecture}), a decoder or an encoder alone was "
        "wanted"
    )
