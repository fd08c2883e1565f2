"""Reports of the benches: figures, claims checked against limits, tables, JSON and plots.

Nothing here starts or measures a process: `suites` and `harness` do that. Begin with `bench_report.py`; every bench
derives its figures from `Figures`.
"""
