"""The process that keeps KV blocks in backends: one a place, started by the supervisor if a profile has backends.

It maps the host slots of its stage, and moves shards of chunks between slots and backends as the core orders. All that
it has can be computed again, so it may end at any time. Another one takes its place.
"""
