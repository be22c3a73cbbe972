"""The answer to "can this serve here?", and the rules that decide it.

Numbers decide, version strings only explain: equal contract numbers serve, unequal ones are
refused by number. What states no number is judged by a named line of versions, or by the number
its adapter found by evidence.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from superfluid_compat.errors import (
    ContractRefused,
    ExitCode,
    RuntimeBroken,
    RuntimeNotInstalled,
    RuntimeUnavailable,
    RuntimeUntested,
)


class State(enum.StrEnum):
    """What stands of a runtime here. Only `ready` serves; `untested` serves when asked to."""

    READY = "ready"
    NOT_INSTALLED = "not-installed"
    UNTESTED = "untested"
    REFUSED = "refused"
    BROKEN = "broken"
    MISSING = "missing"


class Rule(enum.StrEnum):
    """Reason codes of our own. An adapter's probe may give others, with the state they mean."""

    WORKS = "works"
    NUMBER_EQUAL = "number-equal"
    VERSION_LINE = "version-line"
    VERSION_TESTED = "version-tested"
    UNTESTED_ALLOWED = "untested-allowed"
    NUMBER_DIFFERS = "number-differs"
    NUMBER_UNSTATED = "number-unstated"
    BUILD_UNTESTED = "build-untested"
    KIT_DIFFERS = "kit-differs"
    NOT_INSTALLED = "not-installed"
    FILES_MISSING = "files-missing"
    ADAPTER_FAILED = "adapter-failed"
    NO_DEVICE = "no-device"
    """The backend found nothing to compute on; an installer tries the next one."""


_ERRORS: Final[Mapping[State, type[RuntimeUnavailable]]] = {
    State.NOT_INSTALLED: RuntimeNotInstalled,
    State.MISSING: RuntimeNotInstalled,
    State.REFUSED: ContractRefused,
    State.UNTESTED: RuntimeUntested,
    State.BROKEN: RuntimeBroken,
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One decision: its state, the rule that decided, what was found and wanted, what mends it."""

    state: State
    rule: str
    found: str
    wanted: str
    fix: str = ""

    @property
    def serves(self) -> bool:
        return self.state is State.READY

    @property
    def exit_code(self) -> ExitCode:
        """What a command ends with that needed the runtime to serve."""
        return ExitCode.OK if self.serves else _ERRORS[self.state].exit_code

    @property
    def problem(self) -> str | None:
        """What is wrong, in words; None when nothing is."""
        if self.serves:
            return None
        return f"found {self.found}, wanted {self.wanted}" if self.wanted else self.found

    def error(self, runtime: str) -> RuntimeUnavailable:
        """The verdict as the error that a command ends with; not for one that serves."""
        return _ERRORS[self.state](f"runtime {runtime}: {self.problem}", fix=self.fix or None)

    def allowing_untested(self) -> Verdict:
        """The same, with an untested runtime allowed to serve."""
        if self.state is not State.UNTESTED:
            return self
        return replace(self, state=State.READY, rule=Rule.UNTESTED_ALLOWED)


@dataclass(frozen=True, slots=True)
class Line:
    """Versions that state no number and are known to have it: `0.3` is 0.3 and every 0.3.x."""

    versions: str
    number: int

    def holds(self, version: str) -> bool:
        return version == self.versions or version.startswith(f"{self.versions}.")


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a build of an adapter was made for, whether or not anything is installed.

    `what` names the contract, such as `engine ABI`; `numbers` are those it drives. Without
    numbers, the `tested` versions decide.
    """

    what: str
    numbers: tuple[int, ...] = ()
    unnumbered: tuple[Line, ...] = ()
    tested: tuple[str, ...] = ()

    def wanted(self) -> str:
        """`engine ABI 7 or 8, or version 0.3.x`."""
        if not self.numbers:
            return f"{self.what} of a tested version: {', '.join(self.tested)}"
        text = f"{self.what} {' or '.join(str(each) for each in self.numbers)}"
        lines = (line.versions for line in self.unnumbered if line.number in self.numbers)
        return text + "".join(f", or version {versions}.x" for versions in lines)


def judge_library(
    wanted: Requirement, *, version: str, number: int | None, tested: bool = True
) -> Verdict:
    """Whether an adapter made for `wanted` drives a library of this version and contract number.

    `number` is None for a library that states none; `tested` False is the adapter's word that
    nobody tried this build.
    """
    line = next((each for each in wanted.unnumbered if each.holds(version)), None)
    judged = line.number if number is None and line is not None else number
    if wanted.numbers and judged is None:
        return _refused(Rule.NUMBER_UNSTATED, wanted, f"no {wanted.what}, version {version}")
    if wanted.numbers and judged not in wanted.numbers:
        return _refused(Rule.NUMBER_DIFFERS, wanted, f"{wanted.what} {judged}")
    if not tested or (not wanted.numbers and version not in wanted.tested):
        return Verdict(
            State.UNTESTED,
            Rule.BUILD_UNTESTED,
            f"version {version}, which nobody tested",
            _tested(wanted),
            "install a tested version, or allow this one with --untested",
        )
    if not wanted.numbers:
        rule = Rule.VERSION_TESTED
    else:
        rule = Rule.VERSION_LINE if number is None else Rule.NUMBER_EQUAL
    found = f"version {version}" if judged is None else f"{wanted.what} {judged}"
    return Verdict(State.READY, rule, found, wanted.wanted())


def _tested(wanted: Requirement) -> str:
    return f"one of {', '.join(wanted.tested)}" if wanted.tested else "a tested build"


def _refused(rule: Rule, wanted: Requirement, found: str) -> Verdict:
    fix = "install a version that superfluid runtimes shows as installable"
    return Verdict(State.REFUSED, rule, found, wanted.wanted(), fix)


def judge_number(what: str, *, found: int, wanted: int) -> Verdict:
    """Equal contract numbers serve, unequal are refused by number."""
    state = State.READY if found == wanted else State.REFUSED
    rule = Rule.NUMBER_EQUAL if found == wanted else Rule.NUMBER_DIFFERS
    fix = "" if found == wanted else f"install a {what} of contract {wanted}"
    return Verdict(state, rule, f"{what} {found}", f"{what} {wanted}", fix)


def require_number(what: str, *, found: int, wanted: int) -> None:
    """Raise `ContractRefused` naming both numbers unless they are equal."""
    verdict = judge_number(what, found=found, wanted=wanted)
    if not verdict.serves:
        raise ContractRefused(
            f"the other side speaks {verdict.found}, this build speaks {verdict.wanted}",
            fix=verdict.fix,
        )


__all__ = [
    "Line",
    "Requirement",
    "Rule",
    "State",
    "Verdict",
    "judge_library",
    "judge_number",
    "require_number",
]
