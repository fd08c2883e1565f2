"""Answer with less quality instead of late or not at all, as a model's degradation policy says.

The cache of old answers is in `answers/`, expected waits are in `queue/`.
Begin with `degradation.py`.
"""
