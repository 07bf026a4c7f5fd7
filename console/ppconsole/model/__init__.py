"""The console's knowledge: frozen state and pure functions. No terminal, no sockets, no clocks of its own."""
