"""The frozen programs that ratios are to. None of them imports anything of Kelvin.

A changed floor needs a design note with the figures of both programs; `tests/consistency/test_code_rules.py` knows
their digests. Begin with `floor.py`; `suites/floor_bench.py` says what each of the others is asked.
"""
