"""Tokenize text, detokenize ids, and render chat templates.

OpenAI's formats are in `surface/`. Begin with `tokenizer.py`; `chat_template.py` renders templates in a sandbox with a
work budget.
"""
