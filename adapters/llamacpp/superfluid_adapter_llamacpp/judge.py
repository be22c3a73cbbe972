"""From evidence to a verdict, by rules in order; pure.

What decides is the first thing that differs: a library that cannot load, one that is no libllama,
default bytes that fit no layout we know, a layout whose number is not served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from superfluid_adapter_llamacpp.contracts import Contract, Layout, contracts, served
from superfluid_adapter_llamacpp.elf import here
from superfluid_adapter_llamacpp.evidence import Evidence, Written, present_glibc
from superfluid_compat.verdicts import State

Reason: TypeAlias = Literal[
    "cannot-load", "not-llama", "unknown-abi", "number-differs", "canary-failed", "no-device"
]
_INSTALL: Final = "run superfluid runtime install llamacpp"


@dataclass(frozen=True, slots=True)
class Judgement:
    """Why a library does not serve, or, with no `reason`, which contract it keeps."""

    contract: int | None = None
    reason: Reason | None = None
    sentence: str = ""
    fix: str = ""

    @property
    def state(self) -> State:
        if self.reason is None:
            return State.READY
        refused = self.reason in ("unknown-abi", "number-differs")
        return State.REFUSED if refused else State.BROKEN


def judge(found: Evidence) -> Judgement:
    """The first rule that has something to say, else the contract."""
    for rule in _RULES:
        judgement = rule(found)
        if judgement is not None:
            return judgement
    return _by_defaults(found)


def _not_library(found: Evidence) -> Judgement | None:
    if not found.not_library:
        return None
    return Judgement(
        reason="cannot-load",
        sentence=f"{found.path}: {found.not_library}, a shared library was wanted",
        fix=f"name llama.cpp's library file or its folder, or {_INSTALL}",
    )


def _machine(found: Evidence) -> Judgement | None:
    if not found.machine or found.machine == here():
        return None
    return Judgement(
        reason="cannot-load",
        sentence=f"{found.path} is for {found.machine}, this machine is {here()}",
        fix=f"get a build for {here()}, or {_INSTALL}",
    )


def _glibc(found: Evidence) -> Judgement | None:
    present = present_glibc()
    if not found.glibc > present > ():
        return None
    return Judgement(
        reason="cannot-load",
        sentence=f"{found.path} needs glibc {_dotted(found.glibc)}, this machine has "
        f"{_dotted(present)}",
        fix=f"get a build for an older glibc, or {_INSTALL}",
    )


def _dependencies(found: Evidence) -> Judgement | None:
    if not found.missing_libraries:
        return None
    return Judgement(
        reason="cannot-load",
        sentence=f"{found.path} needs {', '.join(found.missing_libraries)}, which is neither "
        "beside it nor in the system",
        fix="put it beside the library, or name the whole folder of the build",
    )


def _loading(found: Evidence) -> Judgement | None:
    if not found.load_error:
        return None
    return Judgement(
        reason="cannot-load",
        sentence=f"{found.path} does not load: {found.load_error}",
        fix=f"get a build for this system, or {_INSTALL}",
    )


def _symbols(found: Evidence) -> Judgement | None:
    if not found.missing_symbols:
        return None
    return Judgement(
        reason="not-llama",
        sentence=f"{found.path} lacks {', '.join(found.missing_symbols)}, which every build of "
        "llama.cpp from b7795 on has",
        fix=f"name a newer libllama, or {_INSTALL}",
    )


def _devices(found: Evidence) -> Judgement | None:
    if found.stage != "done" or found.devices:
        return None
    return Judgement(
        reason="no-device",
        sentence=f"{found.path} finds no device to compute on, not even the processor",
        fix="keep the libggml files of the same build beside it",
    )


_RULES: Final[tuple[Callable[[Evidence], Judgement | None], ...]] = (
    _not_library, _machine, _glibc, _dependencies, _loading, _symbols, _devices,
)  # fmt: skip


def _by_defaults(found: Evidence) -> Judgement:
    fitting = [one.number for one in contracts().values() if not _Differences.of(found, one).all]
    if len(fitting) == 1:
        return _numbered(found, fitting[0])
    number, differs = nearest(found)
    detail = (
        f"contract {number}: {differs[0]}"
        if not fitting
        else (f"contracts {' and '.join(map(str, fitting))} fit alike")
    )
    return Judgement(
        reason="unknown-abi",
        sentence=f"{found.path}{_version(found)} has structs of no layout we know ({detail})",
        fix=f"name a build of contract {_alternatives()}, or {_INSTALL}",
    )


def nearest(found: Evidence) -> tuple[int, tuple[str, ...]]:
    """The contract that the defaults differ from least, and all that differs, the first first."""
    differing = {one.number: _Differences.of(found, one) for one in contracts().values()}
    number = min(differing, key=lambda number: (differing[number].distance, -number))
    return number, differing[number].all


def _numbered(found: Evidence, number: int) -> Judgement:
    if number in served():
        return Judgement(contract=number)
    return Judgement(
        contract=number,
        reason="number-differs",
        sentence=f"{found.path}{_version(found)} is of contract {number}, wanted {_alternatives()}",
        fix=f"name a newer build of llama.cpp, or {_INSTALL}",
    )


@dataclass(frozen=True, slots=True)
class _Differences:
    """What of the evidence differs from a contract: where structs end, and what stands in them."""

    ends: tuple[str, ...]
    members: tuple[str, ...]

    @classmethod
    def of(cls, found: Evidence, contract: Contract) -> _Differences:
        structs = (
            (contract.context, found.context_defaults, found.context_written),
            (contract.model, found.model_defaults, found.model_written),
        )
        return cls(
            tuple(word for layout, _, written in structs for word in _ends(layout, written)),
            tuple(word for struct in structs for word in _members(*struct)),
        )

    @property
    def all(self) -> tuple[str, ...]:
        """All, the one to tell first: a size explains members that moved."""
        return (*self.ends, *self.members)

    @property
    def distance(self) -> tuple[int, int]:
        return len(self.ends), len(self.members)


def _ends(layout: Layout, written: Written | None) -> Iterator[str]:
    # A compiler may or may not write the padding behind the last member.
    if written is not None and not layout.written <= written.end <= layout.size:
        yield f"{layout.struct} defaults end at byte {written.end}, wanted {layout.size}"


def _members(layout: Layout, defaults: str, written: Written | None) -> Iterator[str]:
    for differs in layout.differences(bytes.fromhex(defaults)):
        yield f"{layout.struct} defaults: {differs}"
    holes = layout.covers() & set(written.holes) if written is not None else ()
    if holes:
        yield f"{layout.struct} defaults: byte {min(holes)} is not written"


def _version(found: Evidence) -> str:
    return f" (version {found.version})" if found.version else ""


def _alternatives() -> str:
    return " or ".join(str(number) for number in served())


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
