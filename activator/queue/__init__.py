"""Give each request a slot at a replica of its version: at once or after a wait. Refuse it if there is no slot in time.
Sending a request is in `upstream/`, retries and hedges are in `request/`, reports to the autoscaler are in
`scale_link/`. Begin with `throttler.py`.
"""
