"""llama.cpp through ctypes: any libllama whose layouts are known, judged before it is trusted."""

from superfluid_workerd.adapter import Adapter


def adapter() -> Adapter:
    """The entry point of the group `superfluid.adapters`."""
    from superfluid_adapter_llamacpp.llamacpp import LlamaCppAdapter

    return LlamaCppAdapter()


__all__ = ["adapter"]
