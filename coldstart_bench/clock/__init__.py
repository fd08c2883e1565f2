"""Lies in front of PYTHONPATH: every Python process of an installation then has a wall clock that can be stepped."""
