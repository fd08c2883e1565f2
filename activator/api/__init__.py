"""Handle each public route: completions, lists and timelines, Open Inference, admin and push passthrough, Knative's
data path.

Parsing HTTP is in `http/`, parsing paths is in `routing/`.
Begin with `front_door.py`.
"""
