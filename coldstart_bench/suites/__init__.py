"""The benches of `kelvin bench` and the drill of `kelvin drill`, a file for each: options, run, claims.

Their tables and verdicts are in `report`, what starts processes and load is in `harness`, and what is measured in
processes of its own is in `programs`. Begin with `bench_runner.py`, then read `flood_bench.py`, which is short.
"""
