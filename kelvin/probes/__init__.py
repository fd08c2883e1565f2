"""Looks at the machine and the data directory for `kelvin doctor`: thin, bounded, and without a judgement."""
