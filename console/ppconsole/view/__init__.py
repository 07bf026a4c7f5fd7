"""Pure drawing: a snapshot in, rows of (text, style name) out. No terminal library, so it is tested as text."""
