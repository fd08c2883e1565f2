"""Text to token ids and back, and a model's chat template.

OpenAI's forms and stop strings are `surface/`'s. Begin with `tokenizer.py`; templates are rendered by
`chat_template.py` in a sandbox with a work budget.
"""
