"""Tests, in a folder for each package of the product; and what several folders share.

`conftest.py` holds for every test. Wait with `eventually.py`, start a server or a loop with `listening.py` and
`loops.py`, a process with `forks.py`, let time pass at once with `virtual_loop.py`. A folder's `__init__.py` says which
of its modules stand in for what is around the part under test.

Beyond single packages: `e2e` (an installation as a user has it), `cluster` (a Kubernetes API server), `simulation`,
`drills`, `attack`, `fuzz`, `faults`, and `house` (what documents and code say of one another).
"""
