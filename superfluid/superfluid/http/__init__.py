"""The HTTP face: one room per API, everything behind `GenerationRequest` shared."""
