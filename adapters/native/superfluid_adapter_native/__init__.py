"""The native runtime: models whose weights stay on disk and pass through memory layer by layer."""

from superfluid_workerd.adapter import Adapter


def adapter() -> Adapter:
    """The entry point of the group `superfluid.adapters`."""
    from superfluid_adapter_native.native import NativeAdapter

    return NativeAdapter()


__all__ = ["adapter"]
