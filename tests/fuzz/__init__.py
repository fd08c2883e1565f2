"""Fuzz tests of every parser that reads untrusted input. See docs/fuzzing.md for how and why."""
