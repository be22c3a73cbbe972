"""The channel between daemon and worker: messages, framing, and the JSON answers of a worker."""
