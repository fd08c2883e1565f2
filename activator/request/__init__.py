"""Serve one inference request from its slot to its last byte: attempts, retries, hedged requests, the response.
Handlers are in `api/`, responses that need no replica are in `answers/`. Begin with `inference_request.py`, then
`attempts.py`.
"""
