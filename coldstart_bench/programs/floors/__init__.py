"""The frozen programs that measure the floors. They import nothing of Kelvin.

To change one, write a design note with the figures of both programs; `tests/consistency/test_code_rules.py` knows their
digests. Begin with `floor.py`; `suites/floor_bench.py` says how each of the others is called.
"""
