"""The checks of `kelvin doctor`: each looks at one thing, and yields findings with their cost and their mend.

What judges a figure is a pure function, so that a table of tests covers it. What looks changes nothing, but that
`disk.py` writes a file to measure, and removes it. `doctor.py` runs them in order.
"""
