"""The fake as an adapter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from superfluid_adapter_fake.orders import MAGIC, Orders, read_model
from superfluid_adapter_fake.tokenizer import VOCABULARY, ByteTokenizer
from superfluid_compat.errors import BY_CODE, DoesNotFit
from superfluid_workerd.adapter import (
    Adapter,
    AdapterInfo,
    Device,
    Facts,
    Format,
    LoadedModel,
    OpenRequest,
    Option,
    Options,
    Probe,
    Progress,
    Tokenizer,
)
from superfluid_workerd.options import Kind, Scope


class FakeAdapter(Adapter):
    """Reads files that begin with the fake's magic."""

    def info(self) -> AdapterInfo:
        return AdapterInfo(
            id="fake",
            kit=1,
            summary="a deterministic runtime for tests",
            formats=(Format(name="fake", magic=MAGIC.hex()),),
            aliases=("pretend",),
            version="1.0.0",
        )

    def options(self) -> Sequence[Option]:
        return (
            Option("mode", Kind.CHOICE, "nothing depends on it", "plain", choices=("plain", "odd")),
            Option("cache-bytes", Kind.SIZE, "nothing depends on it", 1 << 20, minimum=0,
                   unit="bytes", scope=Scope.RUNTIME),
            Option("broken", Kind.BOOLEAN, "say that the runtime does not work here", False),
        )  # fmt: skip

    def check(self, options: Options, shared: Path) -> Probe:
        if options["broken"]:
            return Probe(version="1.0.0", problem="the fake was told to be broken", rule="told")
        return Probe(version="1.0.0", abi=1, devices=(Device(name="host"),))

    def facts(self, model: Path) -> Facts:
        orders = read_model(model)
        return Facts(
            format="fake",
            architecture=orders.architecture,
            name=model.stem,
            parameters=1,
            bytes=model.stat().st_size,
            context=orders.context,
            vocabulary=VOCABULARY,
            layers=1,
            types={"F32": 1},
            template=orders.template is not None,
        )

    def prepare(self, facts: Facts, options: Options, shared: Path, progress: Progress) -> None:
        progress(0, 1)
        (shared / f"{facts.architecture}.prepared").touch()
        progress(1, 1)

    def tokenizer(self, model: Path, options: Options) -> Tokenizer:
        read_model(model)
        return ByteTokenizer()

    def open(self, request: OpenRequest) -> LoadedModel:
        from superfluid_adapter_fake.runtime import FakeRuntime

        orders = read_model(request.model)
        _misbehave(orders, request.progress)
        if not orders.silent:
            _require(request, orders)
        return LoadedModel(
            runtime=FakeRuntime(orders, min(request.lanes, orders.max_sequences)),
            tokenizer=ByteTokenizer(),
            facts=self.facts(request.model),
            record=request.record(context=orders.context),
            template=orders.template,
            family=orders.family,
            plan={"weights": 1},
        )


def _require(request: OpenRequest, orders: Orders) -> None:
    if request.lanes > orders.max_sequences:
        raise DoesNotFit(
            f"{request.lanes} lanes were asked for, the model serves {orders.max_sequences}"
        )
    if request.context > orders.context:
        raise DoesNotFit(
            f"a context of {request.context} was asked for, the model has {orders.context}"
        )


def _misbehave(orders: Orders, progress: Progress) -> None:
    if orders.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if orders.grandchild:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        Path(orders.grandchild).write_text(str(child.pid))
    for _ in range(orders.strays):
        if os.fork() == 0:
            os.setsid()
            time.sleep(3600)
    if orders.print_stdout:
        print("an engine that chatters on stdout", flush=True)
    for _ in range(orders.stderr_bytes // 64):
        print("x" * 63, file=sys.stderr)
    progress(0, 10)
    time.sleep(orders.load_s)
    while orders.load_gate and not Path(orders.load_gate).exists():
        time.sleep(0.002)
    progress(10, 10)
    if orders.load_error == "raise":
        raise ZeroDivisionError("an exception of no tree")
    if orders.load_error:
        raise BY_CODE[orders.load_error]("the fake was told to refuse")
