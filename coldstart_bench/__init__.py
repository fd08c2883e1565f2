"""The benches of `kelvin bench` and `kelvin drill`: starts, load, storms, overload, integrity, the ledger, recovery.

They measure a real installation from outside, beside a frozen floor and what a user would pick instead. `loaders` has
programs that are measured in processes of their own. Begin with `__main__.py`, which has a command for each bench.
"""
