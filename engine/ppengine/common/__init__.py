"""Shared by at least two processes: profiles, logs, lifelines, sockets, rings and pages under /dev/shm, /proc."""
