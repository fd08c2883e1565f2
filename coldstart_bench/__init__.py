"""The benches of `kelvin bench` and the drill of `kelvin drill`.

Most measure a real installation, or one of its processes, from outside; where there is a floor (a frozen program) or a
rival, it is measured in the same run. `loaders` has the programs that are measured in processes of their own, `clock` a
wall clock that can be stepped; `installation.py` is what tests use as well. Begin with `__main__.py`, which has a
command for each bench.
"""
