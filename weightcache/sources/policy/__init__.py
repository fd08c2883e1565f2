"""Decide which copy is tried next, which chunk is read next, how much is read at once, and when a read is late. Pure.

The reads themselves are one folder up and in `fetch/`. Begin with `healing.py` and `fair_read_queue.py`.
"""
