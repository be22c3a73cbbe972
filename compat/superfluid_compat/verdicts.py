"""The answer to "can this serve here?", and the rule that decided it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from superfluid_compat.errors import ContractRefused


class State(enum.StrEnum):
    """What stands of a runtime here. Only `ready` serves; `untested` serves when asked to."""

    READY = "ready"
    NOT_INSTALLED = "not-installed"
    UNTESTED = "untested"
    REFUSED = "refused"
    BROKEN = "broken"
    MISSING = "missing"


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


def judge_number(what: str, *, found: int, wanted: int) -> Verdict:
    """Equal contract numbers serve, unequal are refused by number."""
    state = State.READY if found == wanted else State.REFUSED
    fix = "" if found == wanted else f"install a {what} of contract {wanted}"
    return Verdict(state, f"{what}-number", f"{what} {found}", f"{what} {wanted}", fix)


def require_number(what: str, *, found: int, wanted: int) -> None:
    """Raise `ContractRefused` naming both numbers unless they are equal."""
    verdict = judge_number(what, found=found, wanted=wanted)
    if not verdict.serves:
        raise ContractRefused(
            f"the other side speaks {verdict.found}, this build speaks {verdict.wanted}",
            fix=verdict.fix,
        )


__all__ = ["State", "Verdict", "judge_number", "require_number"]
