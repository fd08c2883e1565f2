"""The benches of `kelvin bench` and the drill of `kelvin drill`, a module for each: options, run, claims.

Helpers to start processes and load are in `harness`, programs that run in processes of their own in `programs`, shared
parts of reports in `report`. Begin with `bench_runner.py`, then read `flood_bench.py`, which is short.
"""
