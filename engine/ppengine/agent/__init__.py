"""The agent: reads rings, /proc, cgroups and NVML of one host, and takes stacks. One process a host."""
