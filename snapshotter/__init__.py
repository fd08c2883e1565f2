"""Turn pushed directories into versions, and check, export and collect what is stored.

No model runs here: a standby of the runtime gates and seals (`push/gate_jobs.py`). `intake/` decides what may be
pushed, `push/` serves the calls of a push. Begin with `push/pushes.py`, then `push/publisher.py`.
"""
