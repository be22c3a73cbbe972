"""The OpenAI API: models, completions, chat completions, and tokens in vLLM's shape."""
