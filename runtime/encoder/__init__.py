"""Embeddings: sentence-transformers' encoders, batched by tokens.

`drivers/` has the engine's thread and the batching of rows. Begin with `served_encoder.py`; `recipe.py` reads how
vectors are pooled.
"""
