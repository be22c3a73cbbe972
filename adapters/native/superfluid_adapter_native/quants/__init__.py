"""Weight types: their block layouts and the NumPy decoders that every kernel is tested against."""
