"""Which model classes are served, and how verified tensors become modules of theirs.

Forwards are `drivers/`, `encoder/` and `predictor/`; leases of weights are `lifecycle/weights.py`'s. Begin with
`families.py`, the list of what is served, then `binding.py`.
"""
