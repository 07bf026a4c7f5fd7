"""The parent of an engine's processes: boots them, alone has their exit statuses, and leaves nothing behind."""
