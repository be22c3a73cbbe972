"""A real worker process at the other end of a link, for tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from superfluid_adapter_fake.orders import Orders, write_model

from superfluid_workerd.link import framing
from superfluid_workerd.link.frames import (
    Delta,
    Generate,
    GenerationRequest,
    Hello,
    Load,
    Ready,
    Replay,
    ToDaemon,
    ToWorker,
    Turn,
)

M = TypeVar("M", bound=ToDaemon)


class Worker:
    """`superfluid-workerd ADAPTER serve`, started in its own session; `log` is its stderr, unless
    a descriptor is given for it."""

    def __init__(
        self, folder: Path, adapter: str = "fake", stderr: int | None = None, **environment: str
    ) -> None:
        self.folder = folder
        self.log = folder / "stderr"
        self.channel, theirs = socket.socketpair()
        self.channel.settimeout(60)
        with theirs, self.log.open("wb") as log, (folder / "stdout").open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "superfluid_workerd", "--parent", str(os.getpid()),
                 adapter, "serve", "--link", str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=out,
                stderr=log if stderr is None else stderr,
                start_new_session=True, env={**os.environ, **environment},
            )  # fmt: skip
        self._frames = framing.to_daemon()
        self._arrived: list[ToDaemon] = []
        self.all: list[ToDaemon] = []

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        self.process.kill()
        self.process.wait()

    def send(self, *messages: ToWorker) -> None:
        for message in messages:
            self.channel.sendall(framing.encode(message))

    def messages(self) -> Iterator[ToDaemon]:
        """What arrives, until the worker closes the link."""
        while True:
            while self._arrived:
                yield self._arrived.pop(0)
            try:
                data = self.channel.recv(65536)
            except ConnectionError:
                return
            if not data:
                self._frames.close()
                return
            for message in self._frames.feed(data):
                self.all.append(message)
                self._arrived.append(message)

    def until(self, kind: type[M], holds: Callable[[M], bool] = lambda message: True) -> M:
        """The first message of this kind for which `holds`."""
        for message in self.messages():
            if isinstance(message, kind) and holds(message):
                return message
        raise AssertionError(f"no {kind.__name__} came; it logged {self.log.read_text()}")

    def load(
        self,
        orders: Orders | None = None,
        *,
        lanes: int = 2,
        context: int = 0,
        wait: bool = True,
    ) -> None:
        model = str(write_model(self.folder / "m.fake", orders))
        folder = str(self.folder)
        self.send(
            Hello(),
            Load(
                model=model, name="m", scratch=folder, shared=folder, lanes=lanes, context=context
            ),
        )
        if wait:
            self.until(Ready)

    def generate(
        self, number: int, request: GenerationRequest, replay: Replay | None = None
    ) -> None:
        self.send(Generate(stream=number, request=request, replay=replay))

    def deltas(self, number: int) -> Iterator[Delta]:
        """The stream's deltas up to the one that ends it."""
        for message in self.messages():
            if isinstance(message, Turn):
                for delta in message.deltas:
                    if delta.stream == number:
                        yield delta
                        if delta.finish:
                            return

    def exit_code(self) -> int:
        return self.process.wait(60)
