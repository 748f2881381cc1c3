"""Adapters of attention functions by others, and of regardant's own: each imports what it adapts.

Each says what it offers and in which documented convention; none computes anything that its target does not.
"""
