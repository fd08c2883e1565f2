"""The request and response formats of OpenAI and Open Inference, and content filters.

HTTP and frames are in `api/`, token ids in `text/`. Begin with `served_version.py`, which turns a body into a request
for an engine; `answer_builder.py` turns events into the response.
"""
