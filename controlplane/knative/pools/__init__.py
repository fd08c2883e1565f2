"""Pods that wait for any version: find them, bind and release versions, report how many are wanted.

How many replicas a version has is decided in `scaling/kpa`, how many pods there are by Knative. Begin with
`pool_controller.py`.
"""
