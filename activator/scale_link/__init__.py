"""Tell the autoscaler what is asked for, and start versions while no control plane answers.

Knative's autoscaler and Kelvin's own get the same reports. How many replicas there are is decided by them, not here.
Begin with `load_reporter.py`.
"""
