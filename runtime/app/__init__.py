"""The runtime's two programs, zygote and pod, with their wiring and settings.

The states of a replica are in `lifecycle/`, its routes in `api/`. Begin with `app.py`, the composition root of a
pod and of each process that the zygote forks.
"""
