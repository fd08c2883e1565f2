"""Account for each request while it runs; when it ends, write its usage record, timeline, metrics and log line. The
control plane has prices and bills; `kelvin/spool` makes records durable. Begin with `request_account.py`.
"""
