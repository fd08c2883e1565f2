"""What a start will take and cost, and so how warm an idle model stays.

The break-even rule is in `scaling/policy`; putting a replica to sleep is in `scaling/local`. Begin with
`warmth_cost.py`, then `start_forecasts.py`.
"""
