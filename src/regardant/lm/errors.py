"""What a person can get wrong about a language model: each a `UserError`, with one sentence for that person."""

from __future__ import annotations

from regardant.errors import UserError

__all__ = ["ContextError", "FetchError", "LoadError", "UserError"]


class ContextError(UserError):
    """The text has more tokens than the model has positions for."""


class LoadError(UserError):
    """A model's files are missing, damaged, or hold something that is not implemented."""


class FetchError(UserError):
    """A model could not be fetched, or the fetched copy is not what it should be."""
