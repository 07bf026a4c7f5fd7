"""Built-in backends. Each is imported by its kind alone, as some need packages of an extra."""
