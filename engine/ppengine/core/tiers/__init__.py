"""The store desk: chunks and jobs of the backends, on the side of the core. It never waits for a store."""
