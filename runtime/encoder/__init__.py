"""Embeddings: sentence-transformers' encoders, batched by tokens, behind the engine's own thread."""
