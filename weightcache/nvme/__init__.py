"""Hold chunk files, manifests and attestations on local disk, and verify again what memory and disk hold.

`fetch/nvme_admission.py` decides what is written here, and when. Begin with `nvme_tier.py`; `chunk_files.py` has the
files, `scrubber.py` the checks.
"""
