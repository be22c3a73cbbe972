"""The commands of `superfluid-workerd`: each asks the adapter and answers in JSON."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from superfluid_compat.errors import (
    BadOptionValue,
    ExitCode,
    RuntimeBroken,
    SandboxUnreachable,
    SuperfluidError,
    UsageError,
)
from superfluid_workerd import sandbox
from superfluid_workerd.adapter import Adapter, OpenRequest
from superfluid_workerd.link.answers import About, Facts, InstallPlan, Piece
from superfluid_workerd.link.refusals import in_words, refusal
from superfluid_workerd.registry import checked_options, load_adapter

Arguments = argparse.Namespace
Command = Callable[[Adapter, Arguments, bytes], Any]


def run(call: Arguments, given: bytes, answers: int) -> int:
    """Run one command and write its answer, or the refusal, to `answers`; the exit code.

    `given` is what stood on stdin.
    """
    try:
        if call.command != "serve" and (problem := sandbox.reached().problem):
            raise SandboxUnreachable(problem)
        adapter = load_adapter(call.adapter, Path(call.install) if call.install else None)
        if call.command == "serve":
            return _serve(adapter, call, answers)
        answer = COMMANDS[call.command](adapter, call, given)
    except SuperfluidError as error:
        return _refuse(error, answers)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever an adapter raises becomes a refusal
        traceback.print_exc()
        found = f"{call.adapter} {call.command} failed with {in_words(error)}"
        return _refuse(RuntimeBroken(found), answers)
    _write(answer, answers)
    return ExitCode.OK


def refuse(usage: str, answers: int) -> int:
    """The refusal of arguments that form no command."""
    return _refuse(UsageError(usage, fix="see superfluid-workerd --help"), answers)


def _serve(adapter: Adapter, call: Arguments, answers: int) -> int:
    from superfluid_workerd.worker import serve

    os.close(answers)
    return serve(adapter, call.link)


def _refuse(error: SuperfluidError, answers: int) -> int:
    try:
        _write(refusal(error), answers)
    except OSError:
        print(error.line(), file=sys.stderr)
    return error.exit_code


def _write(answer: Any, answers: int) -> None:
    with open(answers, "wb", closefd=False) as stream:
        stream.write(msgspec.json.encode(answer) + b"\n")


def _options(adapter: Adapter, call: Arguments) -> dict[str, Any]:
    try:
        given = msgspec.json.decode(call.options, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise BadOptionValue(f"--options is no JSON object: {error}", param="options") from error
    return checked_options(adapter, given)


def _read(given: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(given, type=kind)
    except msgspec.MsgspecError as error:
        raise UsageError(f"stdin holds no {kind.__name__}: {error}", fix="send it as JSON") from (
            error
        )


def _text(given: bytes) -> str:
    try:
        return given.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is no UTF-8: {error}", fix="send UTF-8 text") from error


def _about(adapter: Adapter, _call: Arguments, _given: bytes) -> About:
    return About(
        info=adapter.info(),
        options=tuple(each.describe() for each in adapter.options()),
        compat=adapter.compat(),
        versions=tuple(adapter.versions()),
    )


def _facts(adapter: Adapter, call: Arguments, _given: bytes) -> Facts:
    """Of a checked runtime, whose folder is given, the engine's own word too."""
    model = Path(call.model)
    found = adapter.facts(model)
    if call.shared:
        adapter.shared = Path(call.shared)
        adapter.vet(model, _options(adapter, call))
    return found


def _memory(adapter: Adapter, call: Arguments, _given: bytes) -> Any:
    return adapter.memory(
        OpenRequest(
            model=Path(call.model),
            scratch=Path(os.devnull),
            shared=Path(os.devnull),
            context=call.context,
            lanes=call.lanes,
            threads=call.threads,
            memory_budget=call.memory_budget or None,
            options=_options(adapter, call),
        )
    )


def _check(adapter: Adapter, call: Arguments, _given: bytes) -> Any:
    return adapter.check(_options(adapter, call), Path(call.shared))


def _install(adapter: Adapter, call: Arguments, given: bytes) -> Any:
    adapter.install(_read(given, InstallPlan), Path(call.staged))
    return {}


def _prepare(adapter: Adapter, call: Arguments, given: bytes) -> Any:
    facts: Facts = _read(given, Facts)
    adapter.prepare(facts, _options(adapter, call), Path(call.shared), _report)
    return {}


def _report(done: int, total: int) -> None:
    print(f"progress {done} of {total}", file=sys.stderr, flush=True)


def _tokenize(adapter: Adapter, call: Arguments, given: bytes) -> Any:
    adapter.shared = Path(call.shared) if call.shared else None
    tokenizer = adapter.tokenizer(Path(call.model), _options(adapter, call))
    ids = tokenizer.encode(_text(given), add_special=not call.plain, special=call.special)
    if not call.pieces:
        return ids
    return [Piece(id=token, text=tokenizer.piece(token, special=True)) for token in ids]


COMMANDS: Final[Mapping[str, Command]] = {
    "about": _about,
    "info": lambda adapter, _call, _given: adapter.info(),
    "options": lambda adapter, _call, _given: [each.describe() for each in adapter.options()],
    "compat": lambda adapter, _call, _given: adapter.compat(),
    "versions": lambda adapter, _call, _given: list(adapter.versions()),
    "plan": lambda adapter, call, _given: adapter.plan(call.version, call.backend),
    "install": _install,
    "check": _check,
    "facts": _facts,
    "prepare": _prepare,
    "memory": _memory,
    "tokenize": _tokenize,
}
"""What answers each command; `serve` answers over its link instead."""
