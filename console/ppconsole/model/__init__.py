"""What the console knows: frozen state and pure functions. No terminal, no sockets, no clocks of its own."""
