"""Decide what may become a version, and lay it out: strict readers of every pushed format, limits, layout, quota. Pure.

`kelvin push` and `kelvin export` use these readers as well. Storing is done in `push/`. Begin with `intake.py`, which
calls the readers, then `layout.py`.
"""
