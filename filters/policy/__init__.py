"""How a text is cut, so that what is found in it doesn't depend on how it came. Pure."""
