"""How processes of an engine are started and watched: one way to spawn, and one executor for each kind of host."""
