"""A demo of the product, a small trained model, and an Envoy configuration.

Nothing here is imported by the product. Begin with `demo.py`, which `make demo` runs.
"""
