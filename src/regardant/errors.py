"""What a person can get wrong, as an exception whose one sentence is fit to be shown to that person.

A program that talks to people (the command line) shows the sentence of a `UserError` and nothing else. Every
other exception that reaches it, a plain `ValueError` from a shape that does not fit among them, is a bug of
ours, and is left to show its traceback.
"""

from __future__ import annotations


class UserError(ValueError):
    """Something that the caller can put right: a setting, a text, a file. The message is one sentence."""
