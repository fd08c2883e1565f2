"""Looks at what models are told and say: a process of its own, asked by runtimes over a Unix socket."""
