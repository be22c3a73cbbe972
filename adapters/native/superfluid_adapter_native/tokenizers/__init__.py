"""Text to token ids and back, from what a model file says about its tokenizer."""

from superfluid_adapter_native.tokenizers.load import load_tokenizer

__all__ = ["load_tokenizer"]
