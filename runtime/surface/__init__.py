"""What a caller may ask and is answered: OpenAI's and Open Inference's forms, content filters.

HTTP and frames are `api/`'s, token ids `text/`'s. Begin with `serving.py`, which makes a request for an engine out of
a body; `answer_builder.py` makes the answer's text out of events.
"""
