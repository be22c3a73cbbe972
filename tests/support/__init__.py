"""What tests share: builders of tiny models, processes that misbehave, clients."""
