"""Pods that wait for any version: find them, bind and release versions, report how many are wanted.

`scaling/kpa` decides how many replicas a version has, Knative how many pods there are. Begin with `pool_controller.py`.
"""
