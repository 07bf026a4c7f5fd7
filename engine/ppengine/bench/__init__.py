"""`ppconsole bench`: the engine's throughput, beside transformers' `generate`."""
