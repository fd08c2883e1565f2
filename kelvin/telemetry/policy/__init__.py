"""Instruments, labels, spans and sampling: what is exported, under which names. Pure.

Sending is in the folder above. Begin with `instruments.py` for metrics and `spans.py` for traces.
"""
