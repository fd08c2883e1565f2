"""Hold chunk files, manifests and attestations on local disk, and hash again what memory and disk hold.

What is written here, and when, is decided in `fetch/nvme_admission.py`. Begin with `nvme_tier.py`; `chunk_files.py` has
the files, `scrubber.py` the checks.
"""
