"""Tests, in one folder per package of the product, and modules that several folders share.

`conftest.py` applies to every test. Wait with `eventually.py`. Start a server or a loop with `stub_server.py` and
`loop_thread.py`, and a process with `forkserver.py`. Stop one with `process_state.py`. Use `virtual_loop.py` for
virtual time. The `__init__.py` of a large folder names its fakes.

Beyond single packages: `e2e` (an installation as a user has it), `cluster` (a Kubernetes API server), `manifests` (what
is applied to a cluster), `golden` (files that every release must read), `simulation`, `drills`, `attack`, `fuzz`,
`faults`, and `consistency` (docs and code agree).
"""
