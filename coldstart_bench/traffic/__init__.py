"""Benches of the front door under load: an open loop sends what is due, whatever has come of what was sent before."""
