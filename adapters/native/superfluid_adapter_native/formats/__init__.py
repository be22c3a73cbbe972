"""Model files: GGUF and safetensors folders, read into one `ModelSource`."""
