"""Know each request while it runs, and write its usage record, timeline, metrics and log line when it ends.

Prices and bills are the control plane's; durable spooling is in `spool`.
Begin with `request_account.py`.
"""
