"""Turn reports of concurrency into a number of replicas for each version, as Knative's autoscaler does. Decide how warm
the last replica of an idle version stays.

The rules are in `scaling/policy`; replicas are started and ended in `scaling/local` and `knative/pools`. Begin with
`autoscaler.py`.
"""
