"""Answer with less quality instead of late or not at all, as a model's degradation policy says. Old answers are cached
in `answers/`, expected waits are estimated in `queue/`. Begin with `degradation.py`.
"""
