"""The programs of the runtime, and what each is made of: zygote, standby, pod, settings.

The states of a process are `lifecycle/`'s, its routes `api/`'s. Begin with `app.py`, the composition root;
`zygote.py` and `pod.py` are the two programs.
"""
