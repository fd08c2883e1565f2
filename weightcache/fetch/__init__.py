"""Load versions: manifests, attestations, chunks from source after source, each once for all that wait.

Sources are in `sources/`, `nvme/` and `peers/`; memory is in `host/`. Begin with `version_loader.py`, then
`chunk_loader.py` and `fetcher.py`.
"""
