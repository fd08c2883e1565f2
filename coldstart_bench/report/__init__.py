"""The report of a bench: figures, claims held against limits, tables, JSON and plots.

Nothing here starts or measures anything: that is done by `suites` and `harness`. Begin with `bench_report.py`; every
bench derives its figures from `Figures`.
"""
