"""Tests, in a folder for each package of the product; and what several folders share.

`conftest.py` holds for every test. Wait with `eventually.py`, start a server or a loop with `stub_server.py` and
`loop_thread.py`, a process with `forkserver.py`, stop one with `process_state.py`, let time pass at once with
`virtual_loop.py`. Which modules of a large folder stand in for what is around the part under test is in its
`__init__.py`.

Beyond single packages: `e2e` (an installation as a user has it), `cluster` (a Kubernetes API server), `manifests` (what
is applied to a cluster), `golden` (files that every release must read), `simulation`, `drills`, `attack`, `fuzz`,
`faults`, and `house` (what documents and code say of one another).
"""
