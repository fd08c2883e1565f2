"""Load versions: manifests, attestations, and chunks, which are read once for all waiting loads.

Sources are in `sources/`, `nvme/` and `peers/`; memory is in `host/`. Begin with `version_loader.py`, then
`chunk_loader.py` and `fetcher.py`.
"""
