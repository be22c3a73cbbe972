"""From a header to a model that serves: plan, map, keep, bind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from superfluid_adapter_native.config import ModelConfig, configure
from superfluid_adapter_native.executor import StreamingExecutor
from superfluid_adapter_native.facts import facts_of
from superfluid_adapter_native.formats.open import open_source
from superfluid_adapter_native.formats.source import ModelSource
from superfluid_adapter_native.forward import Forwarder
from superfluid_adapter_native.kernels.engine import Kernels
from superfluid_adapter_native.kv_cache import BLOCK
from superfluid_adapter_native.memory import MemoryManager, Probe, default_probe
from superfluid_adapter_native.plan import (
    Ask,
    MemoryPlan,
    budget_bytes,
    kv_shapes,
    make_plan,
)
from superfluid_adapter_native.read_ahead import ReadAhead
from superfluid_adapter_native.runtime import Loaded, NativeRuntime
from superfluid_adapter_native.scheduler import LayerDescriptor, LayerScheduler, select_layers
from superfluid_adapter_native.settings import Settings, threads_for
from superfluid_adapter_native.state import model_key
from superfluid_adapter_native.tokenizers.load import load_tokenizer
from superfluid_adapter_native.weights import (
    WeightStore,
    head_name,
    read_names,
)
from superfluid_compat.errors import BadOptionValue, DoesNotFit
from superfluid_workerd.adapter import LoadedModel, LoadRecord, OpenRequest, Progress
from superfluid_workerd.limits import available_bytes

_TEMPLATE_KEY: Final = "tokenizer.chat_template"


def load(request: OpenRequest, *, rss: Probe = default_probe) -> LoadedModel:
    """Load as `Adapter.open` says. The plan is made before any weight is read."""
    planned = _plan(request, rss)
    source, config, settings = planned.source, planned.config, planned.settings
    ask, plan = planned.ask, planned.plan
    tokenizer = load_tokenizer(source)
    threads = threads_for(request.threads)
    kernels = Kernels(threads=threads, exact=settings.exact, cache=request.shared)
    kernels.prepare({one.type for one in source.tensors.values()}, (settings.kv_type,))
    template = source.metadata.get(_TEMPLATE_KEY)
    return LoadedModel(
        runtime=_Assembly(source, config, settings, ask, plan, kernels).runtime(request.progress),
        tokenizer=tokenizer,
        facts=facts_of(source),
        record=_record(request, settings, plan, threads),
        template=template if isinstance(template, str) else None,
        family=source.architecture,
        plan=dict(plan.parts),
    )


def memory_plan(request: OpenRequest, *, rss: Probe = default_probe) -> dict[str, int]:
    """The plan that `load` would make, in bytes by part; raises what `load` raises before it."""
    return dict(_plan(request, rss).plan.parts)


@dataclass(frozen=True, slots=True)
class _Planned:
    source: ModelSource
    config: ModelConfig
    settings: Settings
    ask: Ask
    plan: MemoryPlan


def _plan(request: OpenRequest, rss: Probe) -> _Planned:
    source = open_source(request.model)
    config = configure(source)
    settings = Settings.of(request.options)
    _check_settings(request, settings, config)
    ask = Ask(
        context=request.context,
        lanes=request.lanes,
        kv_type=settings.kv_type,
        selected=select_layers(len(config.layers), settings.layers, settings.max_layers),
        cache_bytes=settings.cache_bytes,
        read_ahead=settings.read_ahead,
    )
    held = rss()
    budget = budget_bytes(request.memory_budget, held)
    plan = make_plan(source, config, ask, budget=budget, rss=held)
    return _Planned(source, config, settings, ask, plan)


def _check_settings(request: OpenRequest, settings: Settings, config: ModelConfig) -> None:
    if request.context > config.context:
        raise DoesNotFit(
            f"a context of {request.context} tokens was asked for, the model was trained for "
            f"{config.context}",
            fix=f"give --context {config.context} or less",
            param="context",
        )
    if settings.kv_type == "q8_0" and config.head_dim % BLOCK:
        raise BadOptionValue(
            f"kv-type q8_0 needs heads in multiples of {BLOCK}, the model has {config.head_dim}",
            fix="give --native-kv-type f16 or f32",
            param="kv-type",
        )


@dataclass(frozen=True, slots=True)
class _Assembly:
    """Puts the runtime's parts together by the plan."""

    source: ModelSource
    config: ModelConfig
    settings: Settings
    ask: Ask
    plan: MemoryPlan
    kernels: Kernels

    def runtime(self, progress: Progress) -> NativeRuntime:
        # Where the page cache cannot keep what streams until the next walk, it is in the way.
        left = available_bytes() - self.plan.total + self.plan.parts["interpreter"]
        manager = MemoryManager(self.source, direct=left < self.plan.walk_bytes)
        try:
            return self._with(manager, progress)
        except BaseException:
            manager.close()
            self.kernels.close()
            raise

    def _with(self, manager: MemoryManager, progress: Progress) -> NativeRuntime:
        source, plan, selected = self.source, self.plan, self.ask.selected
        store = WeightStore(source, manager, self.kernels)
        if plan.walk_bytes:
            manager.reserve(plan.kept_bytes)
        self._keep(store, progress)
        forwarder = Forwarder(
            self.config,
            store,
            self.kernels,
            selected=selected,
            context=plan.context,
            head=head_name(source),
        )
        key = model_key(source, self.config, manager, (self.ask, self.settings.exact, plan.context))
        layers = self._descriptors()
        scheduler = LayerScheduler(manager, layers)
        reader: ReadAhead | None = None
        units = self._units(layers, store)
        slots = manager.stream(units, plan.rooms)
        if self.settings.read_ahead and len(units) > 1:
            reader = ReadAhead(slots, {names[0]: manager.unit(names[0]) for names in units})
            scheduler = LayerScheduler(manager, layers, prefetch=reader.layer)
            store.prefetch = reader.at

        def close() -> None:
            if reader is not None:
                reader.close()
            manager.close()
            self.kernels.close()

        return NativeRuntime(
            Loaded(
                executor=StreamingExecutor(scheduler, forwarder),
                manager=manager,
                plan=plan,
                shapes=kv_shapes(self.config, selected),
                kv_type=self.ask.kv_type,
                vocabulary=self.config.vocabulary,
                lanes=self.ask.lanes,
                key=key,
                close=close,
            )
        )

    def _keep(self, store: WeightStore, progress: Progress) -> None:
        """Bring in what stays, reporting after each."""
        plan = self.plan
        total = len(plan.matrices) + len(plan.resident)
        for done, name in enumerate(plan.matrices):
            progress(done, total)
            store.hold_matrix(name)
        for done, layer in enumerate(plan.resident, len(plan.matrices)):
            progress(done, total)
            store.hold(layer)
        progress(total, total)

    def _descriptors(self) -> tuple[LayerDescriptor, ...]:
        """The walk: streamed layers with the tensors to read, resident ones with none."""
        resident = set(self.plan.resident)
        return tuple(
            LayerDescriptor(layer, () if layer in resident else read_names(self.source, layer))
            for layer in self.ask.selected
        )

    def _units(
        self, layers: tuple[LayerDescriptor, ...], store: WeightStore
    ) -> list[tuple[str, ...]]:
        """What streams and is read from end to end, in the order of a walk: layers, and the
        head's tiles, one by one."""
        units = [layer.names for layer in layers if layer.names]
        head = head_name(self.source)
        if head not in self.plan.matrices:
            units += [(tile,) for tile in store.split(head, self.plan.tile_bytes)]
        return units


def _record(request: OpenRequest, settings: Settings, plan: MemoryPlan, threads: int) -> LoadRecord:
    own = {
        "layers-resident": len(plan.resident),
        "head-resident": bool(plan.matrices),
        "kv-type": settings.kv_type,
        "exact": settings.exact,
    }
    return request.record(context=plan.context, threads=threads, memory_budget=plan.total, own=own)
