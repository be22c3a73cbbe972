"""Which adapters exist, what each says, and which of them serves a model."""
