"""Read what a client sends: request bodies within limits, and the plan made from them.

`policy/` decides whether a directory may become a version and how it is laid out; `push/` stores it. Begin with
`plan_record.py` and `policy/intake.py`.
"""
