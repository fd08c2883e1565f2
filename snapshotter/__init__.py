"""Make versions of pushed directories: refuse, lay out, stage, pack, seal, publish; give them out, check them, free
them.

No model runs here: a standby of the runtime judges and seals (`push/jobs.py`). What may be pushed is decided in
`intake/`, and the calls of a push are in `push/`. Begin with `push/pushes.py`, then `push/publisher.py`.
"""
