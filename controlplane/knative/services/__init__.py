"""A version's own Knative Service: render it, roll it out, and tell activators what becomes of its pods.

Writing the objects is in `knative/apply`; pods that several versions share are in `knative/pools`. Begin with
`service_renderer.py`, then `version_status.py`.
"""
