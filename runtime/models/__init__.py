"""The served model classes, and how verified tensors become their modules.

Forwards are in `drivers/`, `encoder/` and `predictor/`; leases of weights are in `lifecycle/weights.py`. Begin with
`families.py`, the list of served classes, then `binding.py`.
"""
