"""Report load to the autoscaler, and start versions while no control plane answers. Knative's autoscaler and Kelvin's
own get the same reports, and decide how many replicas there are. Begin with `load_reporter.py`.
"""
