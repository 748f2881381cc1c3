"""The cases, by family."""

from regardant.conformance.catalogue import differences, gradients, hidden, numbers, shapes, visibility

CASES = (
    *visibility.CASES,
    *numbers.CASES,
    *hidden.CASES,
    *shapes.CASES,
    *gradients.CASES,
    *differences.CASES,
)
