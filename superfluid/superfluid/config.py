"""The daemon's own options, and every option's value with where it came from."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from superfluid.logs import Level
from superfluid_compat.errors import BadOptionValue
from superfluid_workerd.options import (
    COMMON,
    SERVICE_CLASSES,
    Kind,
    Option,
    Resolved,
    Scope,
    place_of,
    resolve,
)

CONFIG: Final = Option(
    "config", Kind.PATH, "configuration file; without it superfluid.toml in the folder for "
    "configuration", scope=Scope.DAEMON,
)  # fmt: skip

DAEMON: Final = (
    Option("host", Kind.STRING, "address to listen on", "127.0.0.1", scope=Scope.DAEMON),
    Option("port", Kind.INTEGER, "port to listen on; 0 takes a free one", 8453, minimum=0,
           maximum=65535, scope=Scope.DAEMON),
    Option("name", Kind.STRING, "this server's name; servers of other names share its home",
           "default", scope=Scope.DAEMON),
    Option("runtime", Kind.STRING, "runtime to serve with, as ID or ID@INSTALL; MODEL=ID is for "
           "one model, a comma separates; without it the model's format decides",
           scope=Scope.DAEMON),
    Option("log-level", Kind.CHOICE, "least severe records to log", "info",
           choices=tuple(Level), scope=Scope.DAEMON),
    Option("log-file", Kind.PATH, "file to log to beside standard error", scope=Scope.DAEMON),
    Option("qos", Kind.CHOICE, "class of service of requests that name none", "agent",
           choices=SERVICE_CLASSES, scope=Scope.DAEMON),
    Option("offline", Kind.BOOLEAN, "fetch nothing", False, scope=Scope.DAEMON),
    Option("untested", Kind.BOOLEAN, "let a runtime serve that nobody tested", False,
           scope=Scope.DAEMON),
    CONFIG,
)  # fmt: skip
"""Options of `serve` that the daemon keeps to itself."""

SERVE: Final = (*DAEMON, *COMMON)

Sources: TypeAlias = Sequence[tuple[str, Mapping[str, object]]]
"""(origin, values by option name), strongest first: what `options.resolve` takes."""

USUAL_NAMES: Final = {"SUPERFLUID_LLAMA_LIB": ("llamacpp", "lib")}
"""Variables beside those made from ids and option names: which option of which adapter."""

_SERVER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def settle(
    options: Iterable[Option],
    flags: Mapping[str, object],
    environment: Mapping[str, str] | None = None,
    config: Sources = (),
) -> dict[str, Resolved]:
    """Every option's value and origin: a flag, else its environment variable, else what the
    configuration file says, else its default.

    `flags` holds what was given, by option name. An empty variable counts as unset. Raises
    `UnknownOption` and `BadOptionValue`.
    """
    declared = tuple(options)
    variables = os.environ if environment is None else environment
    found = {
        option.name: text for option in declared if (text := variables.get(option.variable(), ""))
    }
    return resolve(declared, [("flag", flags), ("environment", found), *config])


def adapter_variables(
    adapter: str, environment: Mapping[str, str] | None = None
) -> dict[str, object]:
    """What the environment gives for one adapter, by option name: `SUPERFLUID_ID_OPTION_NAME`, or
    another name that is usual for one."""
    variables = os.environ if environment is None else environment
    prefix = f"SUPERFLUID_{adapter.replace('-', '_').upper()}_"
    usual: dict[str, object] = {
        name: text
        for variable, (id_, name) in USUAL_NAMES.items()
        if id_ == adapter and (text := variables.get(variable))
    }
    return usual | {
        name.removeprefix(prefix).replace("_", "-").lower(): text
        for name, text in variables.items()
        if name.startswith(prefix) and text
    }


def given_by(adapter: str, option: str, origin: str) -> str | None:
    """Where an adapter's option was given, as `place_of` says, by the variable that was set."""
    place = place_of(f"{adapter}-{option}", origin)
    if origin != "environment" or os.environ.get(str(place)):
        return place
    usual = (name for name, meant in USUAL_NAMES.items() if meant == (adapter, option))
    return next((name for name in usual if os.environ.get(name)), place)


def server_name(text: str) -> str:
    """`text`, if it can name a server: it becomes part of file names. Raises `BadOptionValue`."""
    if not _SERVER_NAME.fullmatch(text):
        raise BadOptionValue(
            f"option name was given {text!r}, wanted up to 64 letters, digits, dots, hyphens "
            "and underscores",
            fix="give --name a plain word",
            param="name",
        )
    return text
