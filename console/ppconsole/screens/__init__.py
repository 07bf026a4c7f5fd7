"""Screens: the main one, readers for details, and dialogs that ask before they act."""
