"""Messages about versions: the manifest and the objects beside it, pushes, and the jobs that make a version. Pure.

Serving a version is in `serving`, billing in `accounting`. Begin with `manifest.py`.
"""
