"""Embeddings: sentence-transformers' encoders, batched by tokens.

`drivers/` has the engine's thread and the batching of rows. Begin with `serving.py`; `recipe.py` reads how vectors are
pooled.
"""
