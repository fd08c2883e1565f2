"""Bytes by key: one protocol, several places, behaviour added by wrapping."""
