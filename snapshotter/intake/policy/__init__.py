"""Decide what may become a version, and lay it out: strict readers of every pushed format, limits, layout, quota. Pure.

`kelvin push` and `kelvin export` use these readers, too. `push/` stores what was admitted. Begin with `intake.py`,
which calls the readers, then `layout.py`.
"""
