"""What benches and tests run beside themselves: installations, services, programs, load, faults.

The benches are in `suites`, the programs that `program_runner.py` starts are in `programs`. Begin with
`installation.py`; load begins with `activator_testbed.py` and `load_protocol.py`.
"""
