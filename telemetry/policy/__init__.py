"""Instruments, labels, spans and sampling: what is exported, under which names, and of which requests. Pure."""
