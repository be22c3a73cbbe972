"""Between clients' words and token ids: chat templates in, text out."""
