"""A deterministic runtime for tests, which can be ordered to misbehave."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from superfluid_adapter_fake.fake import FakeAdapter


def adapter() -> FakeAdapter:
    """The entry point."""
    from superfluid_adapter_fake.fake import FakeAdapter

    return FakeAdapter()
