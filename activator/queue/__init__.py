"""Give each request a slot at a replica of its version: at once, after a wait, or refuse it.

Sending the request is in `upstream/`, retries and hedges are in `request/`, reports to the autoscaler are in
`scale_link/`. Begin with `throttler.py`.
"""
