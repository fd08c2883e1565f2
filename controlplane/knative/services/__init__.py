"""A version's own Knative Service: render it, roll it out, and tell activators about its pods.

The objects are written in `knative/apply`; pods that several versions share are in `knative/pools`. Begin with
`service_renderer.py`, then `version_status.py`.
"""
