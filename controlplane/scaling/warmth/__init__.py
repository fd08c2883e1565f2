"""Forecast what a start takes and costs, and from that how warm an idle model stays.

The break-even rule is in `scaling/policy`; replicas are put to sleep in `scaling/local`. Begin with `warmth_cost.py`,
then `start_forecasts.py`.
"""
