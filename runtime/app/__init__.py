"""The runtime's programs and their wiring: zygote, standby, pod, settings.

The states of a replica are in `lifecycle/`, its routes in `api/`. Begin with `app.py`, the composition root;
`zygote.py` and `pod.py` are the two programs.
"""
