"""Widgets that paint rows of `view` and take input."""
