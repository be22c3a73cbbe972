"""Where adapters make themselves known."""

from typing import Final

ADAPTERS: Final = "superfluid.adapters"
"""The entry point group of adapters: the name is the runtime's id, the value a function without
arguments that returns the adapter."""
