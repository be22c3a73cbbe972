"""The contract numbers: two sides whose numbers are equal work together, others do not.

Numbers decide, version strings only explain. Raise one in the same commit that changes what it
stands for, with a changelog fragment of the kind `contract`.
"""

from typing import Final

LINK: Final = 2
"""Frames and framing between daemon and worker (`superfluid_workerd.link`)."""

KIT: Final = 1
"""What an adapter implements and may call (`superfluid_workerd.adapter`)."""

COMPAT_SCHEMA: Final = 1
"""Layout of `compat.json`."""
