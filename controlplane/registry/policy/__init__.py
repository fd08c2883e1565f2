"""Domain types of models and versions, and the rules of the registry. Pure: no storage, no clock.

Scale settings are in `scaling/`. Begin with `domain.py`.
"""
