"""The fake's model file: a magic line, then one JSON object, what the model is and does wrong.

write_model(folder / "m.fake", script="Hello world. ", die=Moment(tokens=40, signal="SIGSEGV"))
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal

import msgspec

from superfluid_compat.errors import ModelDamaged

MAGIC: Final = b"SFFAKE1\n"
Act = Literal[
    "signal", "exit", "hang", "fault", "fatal", "raise", "garbage", "half-frame", "escape", "hoard",
    "count",
]  # fmt: skip


class Moment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An act when the runtime has been fed `tokens` tokens in all.

    `escape` tries everything in `hostile` on `targets`; `hoard` takes memory without end; `count`
    prints how many objects a full collection looks at. `signal` and `exit` say how to die for acts
    of that name. With `once`, a path, it happens only while that file does not exist, and makes it
    first.
    """

    act: Act
    tokens: int = 0
    signal: str = "SIGKILL"
    exit: int = 1
    targets: dict[str, str] = {}
    once: str | None = None

    def due(self) -> bool:
        """Whether it is to happen now; true once only, with `once`."""
        if self.once is None:
            return True
        try:
            os.close(os.open(self.once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


class Orders(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the model is, and what goes wrong with it.

    `script` makes greedy decoding repeat this text, the byte at position i being that of index i
    modulo its length; without it the likeliest token is as random as the rest. From length `eos`
    on the likeliest token is the end of the text. `gate` is a path: while it is missing a step
    waits, ticking. `step_s` is how long each step takes. `spare` sequences may exist beside those
    of the lanes. All together hold `tokens` tokens, 0 for no such bound; `tells` is whether that
    is said. `swap` bytes of exported sequences are to be held. `retry` says that a failed step may
    be given again.
    """

    context: int = 256
    step_tokens: int = 64
    max_sequences: int = 64
    spare: int = 0
    tokens: int = 0
    tells: bool = True
    swap: int = 0
    retry: bool = False
    copy: bool = True
    export: bool = True
    truncate: Literal["any", "zero"] = "any"
    generates: bool = True
    """Whether it gives text."""
    width: int = 8
    """Floats of an embedding, 0 for a model that gives none."""
    script: str = ""
    eos: int | None = None
    template: str | None = None
    family: str = ""
    architecture: str = "fake"
    silent: bool = False
    """More context or lanes than there are is cut in silence, where it should be refused."""

    step_s: float = 0.0
    gate: str | None = None
    moments: tuple[Moment, ...] = ()
    poison: str = ""
    """The process dies of SIGSEGV when one of these characters is fed."""
    greed: str = ""
    """It takes memory without end when one of these is."""

    load_s: float = 0.0
    load_gate: str | None = None
    load_objects: int = 0
    """What a load makes and keeps, all of it looked at by each full collection."""
    load_error: str | None = None
    """Code of the error that refuses the load; `raise` for an exception of no tree."""
    stderr_bytes: int = 0
    print_stdout: bool = False
    ignore_term: bool = False
    grandchild: str | None = None
    """A path: a child process that sleeps is started at load, its pid written there."""
    strays: int = 0
    """As many copies of the process, each in a session of its own, are made at load."""


def write_model(path: Path, orders: Orders | None = None) -> Path:
    """A model file with these orders."""
    path.write_bytes(MAGIC + msgspec.json.encode(orders or Orders()))
    return path


def read_model(path: Path) -> Orders:
    """Raises `ModelDamaged`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelDamaged(f"{path} cannot be read: {error.strerror}") from error
    if not data.startswith(MAGIC):
        raise ModelDamaged(f"{path} does not begin with the fake's magic")
    try:
        return msgspec.json.decode(data[len(MAGIC) :], type=Orders)
    except msgspec.MsgspecError as error:
        raise ModelDamaged(f"{path}: {error}") from error
