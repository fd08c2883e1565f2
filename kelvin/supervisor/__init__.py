"""Starts, restarts, reaps and ends the processes of one installation."""
