"""The benches of `kelvin bench` and the drill of `kelvin drill`.

`suites` has a module per bench, `harness` what they share, `programs` the programs that run in processes of their own,
`report` the reports, and `clock` a wall clock that can be stepped. Most benches measure a real installation, or one of
its processes, from outside. If there is a floor (a frozen program) or a rival, the same run measures it as well. Tests
use `harness/installation.py`, too. Begin with `__main__.py`, which has a command for each bench.
"""
