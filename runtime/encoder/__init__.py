"""Embeddings: sentence-transformers' encoders, batched by tokens.

The engine's thread and the batching of rows are `drivers/`'s. Begin with `serving.py`; `recipe.py` reads how vectors
are pooled.
"""
