"""Continuous batching over transformers' model definitions, readable in an hour."""
