"""Which vector instructions the kernels may use: a table over what the processor states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Dot = Literal["evex", "vex", "neon", "plain"]
Lookup = Literal["pshufb", "tbl", "plain"]


@dataclass(frozen=True, slots=True)
class Features:
    """`dot` multiplies bytes and sums fours; `lookup` reads sixteen-entry byte tables.

    `evex` and `vex` are x86's VNNI in its AVX-512 and its AVX encoding, `neon` is Arm's dot
    product, and `plain` is correct on every processor.
    """

    dot: Dot = "plain"
    lookup: Lookup = "plain"

    @property
    def unsigned(self) -> bool:
        """Whether the product's first operand is unsigned, as x86 wants it."""
        return self.dot in ("evex", "vex")

    @property
    def lanes(self) -> int:
        """Floats of a register: sixteen where there is AVX-512, eight in one or two elsewhere."""
        return 16 if self.dot == "evex" else 8

    @property
    def name(self) -> str:
        return f"{self.dot}_{self.lookup}"


PLAIN: Final = Features()

_DOTS: Final[tuple[tuple[frozenset[str], Dot], ...]] = (
    (frozenset({"avx512vnni", "avx512vl"}), "evex"),
    (frozenset({"avxvnni"}), "vex"),
    (frozenset({"dotprod"}), "neon"),
)
_LOOKUPS: Final[tuple[tuple[frozenset[str], Lookup], ...]] = (
    (frozenset({"avx2"}), "pshufb"),
    (frozenset({"neon"}), "tbl"),
)


def choices(stated: frozenset[str]) -> list[Features]:
    """All of our tables that the features stated, in LLVM's names, allow; the best first."""
    lookups: list[Lookup] = [lookup for wanted, lookup in _LOOKUPS if wanted <= stated]
    dots: list[Dot] = [dot for wanted, dot in _DOTS if wanted <= stated]
    best: Lookup = lookups[0] if lookups else "plain"
    return [*(Features(dot, best) for dot in dots), Features("plain", best), PLAIN]


def stated_here() -> frozenset[str]:
    """What this processor states."""
    import llvmlite.binding as llvm

    return frozenset(name for name, has in llvm.get_host_cpu_features().items() if has)


def host() -> Features:
    """The best that this processor allows."""
    return choices(stated_here())[0]
