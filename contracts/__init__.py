"""The nouns that Kelvin's processes share. Pure: no I/O, no clock, nothing of ours imported."""
