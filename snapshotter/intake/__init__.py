"""Take in what a client sends: bodies within bounds, and the plan that is made of them.

Whether a directory may become a version, and how it is laid out, is decided in `policy/`; storing it is done in
`push/`. Begin with `plan_record.py` and `policy/intake.py`.
"""
