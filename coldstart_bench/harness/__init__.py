"""Helpers of benches and tests: installations, services, programs, load, faults.

The benches are in `suites`; the programs that `program_runner.py` starts are in `programs`. Begin with
`installation.py`; for load, with `activator_testbed.py` and `load_protocol.py`.
"""
