"""Versions: the manifest and what lies beside it, pushes, and the jobs that make one. Pure.

Serving a version is in `serving`, paying for it in `accounting`. Begin with `manifest.py`.
"""
