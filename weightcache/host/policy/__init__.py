"""Decide where chunks go in slabs, what is evicted, and how many slabs and threads there are. Pure.

Memory and threads are one folder up. Begin with `host_index.py`.
"""
