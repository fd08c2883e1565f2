"""Handle the public routes: completions, lookups, Open Inference, admin and push passthrough, and Knative's data path.
HTTP is parsed in `http/`, paths in `routing/`. Begin with `front_door.py`.
"""
